"""The environment variables that the code reads or sets: a record of their meaning, and those that the code names.

`scripts.write_docs` makes docs/environment.md of the record; a test compares the record with the code.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "environment.md"

INTRODUCTION = """\
# Environment variables

```sh
NCCL_DEBUG=INFO shardwise doctor | grep NCCL
```

```text
NCCL_DEBUG=INFO
```

`shardwise doctor` prints, and `environment.json` in a run's folder records, the variables that change how a run works,
without secrets. `launch.environment` sets variables in a submitted job. shardwise reads or sets the variables below and
no others; torch, NCCL, rich (`NO_COLOR`) and the Hugging Face hub (`HF_TOKEN`) describe theirs.
"""
RECORD = {
    "Yours": {
        "SHARDWISE_CACHE": "folder of prepared data, fetched files and compiled graphs; else `~/.cache/shardwise`",
        "XDG_CACHE_HOME": "instead of `~/.cache`",
        "CUDA_VISIBLE_DEVICES": "GPUs that are counted and used; empty: the CPU",
        "NEURON_RT_VISIBLE_CORES NEURON_RT_NUM_CORES": "cores of AWS that are counted; each rank takes one",
        "NEURON_LOGICAL_NC_CONFIG": "physical cores of AWS that make one logical core, a rank's device",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0: packages that add a device to torch are not loaded",
        "OMP_NUM_THREADS": "threads of a rank on a CPU; set to its share of the processors if unset",
        "WANDB_MODE WANDB_PROJECT MLFLOW_EXPERIMENT_ID MLFLOW_EXPERIMENT_NAME": (
            "W&B's mode, and defaults of `log.project`"
        ),
        "CC CXX": "C and C++ compilers of compiled training",
        "TERM": "`dumb`: no bars, and no screen of `top`",
    },
    "Of a launcher": {
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT": (
            "a rank's place and where rank 0 listens, as torchrun sets them; take precedence over those below"
        ),
        "GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE": "likewise, of nodes; also set for ranks",
        "TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RESTART_COUNT": (
            "torchrun's store and restarts"
        ),
        "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_TASKS_PER_NODE SLURM_STEP_ID SLURM_STEP_NUM_TASKS "
        "SLURM_STEP_TASKS_PER_NODE SLURM_STEP_NODELIST SLURM_DISTRIBUTION SLURM_HET_SIZE ENVIRONMENT": (
            "place of a task of `srun`"
        ),
        "SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_JOB_END_TIME SLURM_RESTART_COUNT SLURMD_NODENAME": (
            "the job, its end and its node"
        ),
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE "
        "OMPI_MCA_ess_base_jobid PMIX_NAMESPACE": "Open MPI",
        "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE MPIRUN_ID": (
            "MVAPICH2"
        ),
        "PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE PMI_JOBID PMI_FD MPI_LOCALRANKID MPI_LOCALNRANKS "
        "I_MPI_HYDRA_UUID PALS_APID": "MPICH and Intel MPI",
        "PMIX_RANK PALS_RANKID FLUX_TASK_RANK FLUX_JOB_SIZE JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE ALPS_APP_PE "
        "MPT_MPI_RANK": "other launchers, which do not say how many ranks there are: the process ends with an error",
        "HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK": "a device for each rank, if a launcher shows one",
    },
    "Set unless you set them": {
        "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME": "interface of the way to rank 0, in jobs of several nodes",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1, as by torchrun",
        "TORCH_GLOO_LAZY_INIT": "1 in large jobs: gloo connects ranks at their first message",
        "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF": "if neither is set, CUDA's allocator extends its segments",
        "CUBLAS_WORKSPACE_CONFIG": "`:4096:8`, for equal bits",
        "KINETO_LOG_LEVEL": "6, in a run with `log.profile`",
        "TORCHINDUCTOR_COMPILE_THREADS": "a share of the processors for each process that compiles",
        "PYDANTIC_DISABLE_PLUGINS": "all of them, in commands",
    },
    "Always set, in processes that shardwise starts": {
        "TORCHINDUCTOR_CACHE_DIR": "a run's folder of graphs, while it compiles",
        "TOKENIZERS_PARALLELISM RAYON_NUM_THREADS": "threads of a process that tokenizes",
        "SHARDWISE_ERROR_FILE SHARDWISE_HEARTBEATS SHARDWISE_PARENT_PID SHARDWISE_RANK_PROCESS": (
            "between a launcher and its ranks"
        ),
        "SHARDWISE_NODE": "from the supervisor of a job to its launchers; holds a secret",
        "SHARDWISE_REPLAY": "in a replay of `shardwise audit`",
    },
}
"""Section → variables, separated by blanks → meaning."""
END = """
Next: [configuration](configuration.md), for what the recipe decides; [several machines](cluster.md), for launchers.
"""

_OTHER_NAMES = {
    "AF_UNIX", "ALL_F32", "BLOCK_SIZE", "BUILT_IN_TEXTS", "CHAT_KEYS", "DCP_SHARDING_INFO", "DTYPE_BYTES", "F8_E4M3",
    "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0", "JOB_ID", "MOSTLY_BF16", "MOSTLY_F16", "NVML_NVLINK_MAX_LINKS",
    "PLAIN_MODULE", "RESTART_COUNT", "SC_PAGE_SIZE", "SC_PHYS_PAGES", "STEP_ID", "UNSAFE_CODE",
}  # fmt: skip
"""Texts of the code that look like variables: formats, names of other libraries, ends of names."""
_EXAMPLES = {"NCCL_DEBUG"}
"""Variables that only an example of the code or of the page names."""


def recorded() -> list[str]:
    """The variables of the record."""
    return [name for rows in RECORD.values() for names in rows for name in names.split()]


def read_in_code(modules: Mapping[Path, ast.Module]) -> set[str]:
    """The variables that modules read or set: any text that looks like one, and each use of the environment."""
    trees = [tree for path, tree in modules.items() if path.name != "redaction.py"]
    return {name for tree in trees for name in _named(tree)} - _OTHER_NAMES - _EXAMPLES


def _named(tree: ast.Module) -> Iterator[str]:
    """A module's variables."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            # Of two parts at least: other words in capitals are many.
            if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Za-z0-9]+)+", node.value):
                yield node.value
        elif isinstance(node, ast.keyword) and re.fullmatch(r"[A-Z][A-Z_]+", node.arg or ""):
            yield str(node.arg)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_environment(node.func.value):
            key = node.args[0] if node.args and node.func.attr in ("get", "pop", "setdefault") else None
        elif isinstance(node, ast.Subscript) and _is_environment(node.value):
            key = node.slice
        elif isinstance(node, ast.Compare) and _is_environment(node.comparators[0]):
            key = node.left
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def _is_environment(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "environ" and isinstance(node.value, ast.Name) and node.value.id == "os"
    return isinstance(node, ast.Name) and node.id in ("variables", "environment")


def page() -> str:
    """docs/environment.md."""
    parts = [INTRODUCTION]
    for title, rows in RECORD.items():
        lines = [f"\n## {title}\n"]
        for names, meaning in rows.items():
            lines.append(f"- {', '.join(f'`{name}`' for name in names.split())}: {meaning}")
        parts += ["\n".join(lines), "\n"]
    return "".join([*parts, END])
