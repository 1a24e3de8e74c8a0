"""Published training runs as configurations of ours: which can be expressed, and on what they ran.

`data/published_runs.csv` is a copy of published figures; each row names its source. `fitting_rows` is the split: the
constants of the planner are fitted on these rows, and on the times of a layer below, and on nothing else.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.config import Config, Layout, check_layout, config_from_sections
from shardwise.models.flops import flops_per_token
from shardwise_plan.device_seconds import DeviceConstants, shipped_constants
from shardwise_plan.device_specs import Cluster, Device, DeviceLink, load_device
from shardwise_plan.program_traits import ProgramTraits
from shardwise_plan.step_time import StepTime, step_time

PATH = Path(__file__).parent / "data" / "published_runs.csv"
FITTED_SOURCE = "VIA-Research/vTrain data/ground_truth_single.csv"
EVERY = 5  # of the rows of that source, the first of each five is fitted

MEGATRON = ProgramTraits(
    fused_attention=False,
    loss_ahead=False,
    overlaps=False,
    waits_for_messages=True,
    splits_messages=True,
    casts_gradients=False,
    recomputes_core=True,
    travels_once=False,
    updates_in_one_pass=True,  # the fitted bandwidth of the update belongs to this count of bytes
    kernels=30,
)
# DeepSpeed's ZeRO-1 for bfloat16 (BF16_Optimizer, PipelineEngine._bf16_reduce_grads) copies the gradients of each
# micro-batch to float32 before it adds them, and all-reduces all of them. BigScience's scripts set
# CUDA_LAUNCH_BLOCKING=1, without which their runs hung (chronicles-prequel.md, "dealing with JZ hanging").
BIGSCIENCE = replace(MEGATRON, runs_ahead=False)
BIGSCIENCE_FLOAT32 = replace(BIGSCIENCE, casts_gradients=True, reduces_all=True)
# NeMo and Megatron-Bridge on H100 and later (their recipes and `ub_tp_comm_overlap_cfg`): Transformer Engine's blocks,
# user buffers for tensor parallelism, keys and values in a ring, messages between stages behind work, gradients reduced
# and weights gathered behind passes. Norms, activations and dropouts are one kernel each.
MEGATRON_CORE = ProgramTraits(
    loss_ahead=False,
    adds_products=True,
    updates_in_one_pass=True,
    recomputes_core=True,
    recomputes_ring=False,
    travels_once=False,
    kernels=14,
    tensor_overlap="user_buffers",
    rounding_bytes=4,
)
# Bytes by which Transformer Engine rounds an element of bfloat16 in both orders, and writes two of one byte: delayed
# scales are those of earlier steps, current ones need another read, and blocks of 32 (MXFP8) one read for each order.
_ROUNDING = {"fp8 current scaling": 6, "mxfp8": 6}
# Compiled blocks with FSDP2, of NeMo Automodel.
FULLY_SHARDED = ProgramTraits(loss_ahead=False, updates_in_one_pass=True, travels_once=False)
# Composer 0.16 and llm-foundry 0.4, with torch's FSDP of 2023. A block's functions are a kernel each. FSDP copies a new
# gradient into a flat tensor (the gradient of `split`), to float32 in DEFAULT precision, and divides it there
# (`_runtime_utils.py`). Composer takes two metrics of each micro-batch (`LanguageCrossEntropy`, `LanguagePerplexity`),
# each of which copies the logits to float32 (6 bytes) and computes the logarithm of their softmax (8 bytes), after a
# fused loss that reads the logits, and backward reads them and writes their gradient. The eight functions that
# `DecoupledAdamW` calls read and write 20 values of an element, and clipping reads and writes the gradient. After each
# step Composer computes the two metrics (`_compute_and_log_metrics`), each of which gathers two numbers of all ranks
# (`_simple_gather_all_tensors` of torchmetrics 0.11 to 1.0): a tensor of zeros for each rank, and a copy to it from the
# gathered one. fp8 is Transformer Engine's, with scales of earlier steps.
COMPOSER = replace(
    FULLY_SHARDED,
    flattens_gradients=True,
    updates_in_one_pass=False,
    separate_kernels=True,
    rounding_bytes=4,
    logits_bytes=(2 + 2 + 2 * 14, 2 + 2),
    update_values=22,
    gathered_metrics=4,
)
# Parts of the peak that attention in Triton (`--attn_impl triton`) reaches forward and backward: 30 to 50%, and 25 to
# 35%, on an A100 (arXiv:2307.08691, introduction). Like FlashAttention-2, whose part forward is 0.6 on an A100 and 0.34
# on an H100 (arXiv:2307.08691, arXiv:2407.08608), it uses no instruction that only an H100 has.
_TRITON_SHARES = {"A100": (0.4, 0.3), "H100": (0.23, 0.17)}
_FLASH_2_ON_H100 = (0.34, 0.29)
# From 28 February 2022 on BigScience's runs added gradients in float32, and counted embedding and head as a block each
# when they divided the model into stages (chronicles-prequel.md, "Rebalancing layers").
_REBALANCED = "Rebalancing layers"
# experiments/bandwidth/all_reduce_bench-a100-n4.txt in bigscience-workshop/bigscience: an all-reduce over 4 nodes had a
# bus bandwidth of 40.5 Gb/s, that of the 8 devices of a node together. It was measured before 25 February 2022, the day
# on which the machine was repaired ("PCI-Express/NUMA was improved", chronicles-prequel.md).
_JEAN_ZAY = 40.5e9 / 8 / 8

# arXiv:2205.05198, table 4: milliseconds of a layer of the 22B model (hidden 6,144, 64 heads, 2,048 tokens, micro-batch
# 4, TP 8): sequence parallelism, recompute, forward, backward with recompute.
LAYER_TIMES = (
    (False, "none", 7.7, 11.9),
    (True, "none", 7.2, 11.8),
    (True, "selective", 7.2, 13.1),
    (False, "full", 7.7, 19.5),
)


# The models' own configurations: Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B and mistralai/Mixtral-8x7B-v0.1.
_QWEN3 = {
    "family": "qwen3_moe", "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
_SPARSE: dict[str, dict[str, Any]] = {
    "qwen3-30b": {**_QWEN3, "intermediate_size": 6144, "moe_intermediate_size": 768},
    "qwen3-235b": {**_QWEN3, "intermediate_size": 12288, "moe_intermediate_size": 1536},
    "mixtral-8x7b": {"family": "mixtral", "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
}


@dataclass(frozen=True)
class Row:
    """A published run. `reason` says why it cannot be expressed; then it has no configuration."""

    number: int
    source: str
    model: str
    values: dict[str, str]
    reason: str = ""
    config: Config | None = None
    layout: Layout | None = None
    cluster: Cluster | None = None
    program: ProgramTraits = MEGATRON
    measured: float = 0.0

    def predicted(self, constants: DeviceConstants | None = None) -> StepTime:
        assert self.config is not None
        assert self.layout is not None
        assert self.cluster is not None
        found = step_time(self.config, self.layout, self.cluster, self.program, constants)
        assert found is not None
        return found

    @property
    def is_sparse(self) -> bool:
        return bool(self.values["ep"])

    @property
    def is_fitted(self) -> bool:
        return self.source.startswith(FITTED_SOURCE) and self.number % EVERY == 0


@cache
def rows() -> tuple[Row, ...]:
    """All published runs, in the order of the file; numbers count within a source."""
    found, counts = [], dict[str, int]()
    with PATH.open(encoding="utf-8", newline="") as file:
        for values in csv.DictReader(file):
            source = values["source"]
            counts[source] = counts.get(source, -1) + 1
            found.append(_row(counts[source], source, values))
    return tuple(found)


def fitting_rows() -> list[Row]:
    """The rows that the constants are fitted on."""
    return [row for row in rows() if row.is_fitted and not row.reason]


def layer(sequence: bool, recompute: str) -> tuple[Config, Layout, Cluster]:
    """The layer of `LAYER_TIMES`."""
    values = {
        "layers": "1", "hidden": "6144", "heads": "64", "vocab": "51200", "seq": "2048", "global_batch": "4",
        "micro_batch": "4", "tp": "8", "pp": "1", "dp": "1", "sp": str(int(sequence)), "recompute": recompute,
        "gpu": "A100-80GB", "n_gpu": "8",
    }  # fmt: skip
    config = config_from_sections(_values(values))
    return config, check_layout(config, 8), _cluster("arXiv:2205.05198", "A100-80GB", 8)


def _row(number: int, source: str, values: dict[str, str]) -> Row:
    values = {**values, **_scripts(source, values)}
    base = Row(number, source, values["model"], values)
    reason = _why_not(values)
    if reason:
        return replace(base, reason=reason)
    try:
        config = config_from_sections(_values(values))
        layout = check_layout(_without_fp8(config), int(values["n_gpu"]))
    except ConfigError as error:
        return replace(base, reason="refused: " + error.problems[0].partition(":")[0])
    if str(layout.data) != values["dp"]:
        return replace(base, reason=f"DP {values['dp']} is not what {values['n_gpu']} devices give ({layout.data})")
    return replace(
        base,
        config=config,
        layout=layout,
        cluster=_cluster(source, values["gpu"], int(values["n_gpu"])),
        program=_program(source, values),
        measured=_seconds(values) or _seconds_by_megatron(config, values),
    )


def _why_not(values: dict[str, str]) -> str:
    needed = ("layers", "hidden", "heads", "vocab", "seq", "global_batch", "micro_batch", "tp", "pp", "dp", "n_gpu")
    if "nvfp4" in values["precision"]:
        return "a number format of four bits"
    if "a part of the layers" in values["notes"]:
        return "the recipe recomputes or offloads a part of the layers"
    missing = [one for one in needed if not values[one]]
    if missing:
        return f"not published: {', '.join(missing)}"
    if _gpu(values["gpu"]) is None:
        return f"a device that is not described: {values['gpu']}"
    if values["precision"].endswith("rowwise"):
        return "scales for each row"
    if "SUSPECT" in values["notes"] or "does not fill the cores" in values["notes"]:
        return "published figures disagree with each other"
    if values["model"].startswith("bert") or values["precision"] == "fp32":
        return "BERT on Trainium: predicted positions not published"
    if not (_seconds(values) or "Megatron-LM's count" in values["notes"]):
        return "no time is published, and none follows"
    return ""


def _without_fp8(config: Config) -> Config:
    """The configuration as its layout is checked: fp8 products of experts, which other programs have, are refused."""
    is_sparse = config.known_shapes.any_routing is not None
    return config.with_keys(precision={"matmul": None}) if is_sparse else config


def _seconds_by_megatron(config: Config, values: dict[str, str]) -> float:
    """The step time from TFLOP/s in which attention to masked tokens counts."""
    train = config.train
    flops = flops_per_token(config.model, train.sequence_length, count_masked=True)
    assert flops is not None
    rate = float(values["tflops_per_gpu"]) * 1e12 * int(values["n_gpu"])
    return flops * train.global_batch * train.sequence_length / rate


def _scripts(source: str, values: dict[str, str]) -> dict[str, str]:
    """What tables leave out and scripts or recipes of the same release set.

    AWS: sequence parallelism, and recompute. `gpt_23b.sh`, `gpt_46b.sh`, `gpt_175b.sh` and `test_llama.sh` of
    aws-neuron/neuronx-nemo-megatron for the runs with stochastic rounding; the tutorials "Training Llama with TP, PP
    and ZeRO-1" of neuronx-distributed for others.

    NVIDIA: sequence parallelism with tensor parallelism, no recompute, a distributed optimizer, and gradients in
    bfloat16 (`grad_sync_dtype: bf16`, `grad_reduce_in_fp32: false`). `nemo_megatron/gpt3_175b_hydra.yaml`,
    `nemotron/nemotron4-15b-synth.yaml`, `llama3.1/*.yaml` of NVIDIA/dgxc-benchmarking (8f5cbb3, 143b90d);
    `scripts/performance/configs` of NVIDIA-NeMo/Megatron-Bridge, and `conf/custom.yaml` with the `config_*.sh` of each
    system in MLPerf Training's results.
    """
    if _is_nemo(source):
        sequence = str(int(int(values["tp"] or 1) > 1))
        return {"sp": sequence, "recompute": values["recompute"] or "none", "zero": values["zero"] or "1"}
    if "aws-neuron" not in source:
        return {}
    if values["model"].startswith("gpt"):
        recompute = "full" if values["model"] == "gpt3-46b" else "selective"
    else:
        recompute = "full" if values["precision"].endswith("SR") else "selective"
    return {"sp": "1", "recompute": recompute}


def _is_nemo(source: str) -> bool:
    programs = ("NVIDIA/dgxc-benchmarking", "NVIDIA/NeMo", "NVIDIA-NeMo/Megatron-Bridge", "mlcommons/")
    return source.startswith((*programs, "NVIDIA/Megatron-LM megatron/core/transformer/moe"))


def _stages(row: dict[str, str]) -> list[int] | None:
    """Blocks of each stage as Megatron and DeepSpeed divide them: equally, in DeepSpeed with a smaller last stage."""
    layers, stages = int(row["layers"]), int(row["pp"])
    virtual = int(row.get("vpp") or 1)
    if stages == 1 or (layers % (stages * virtual) == 0 and virtual > 1):
        return None
    if virtual > 1:
        # Embedding and head count as a block each.
        each = (layers + 2) // (stages * virtual)
        return [each - 1, *[each] * (stages * virtual - 2), each - 1]
    if _REBALANCED in row.get("notes", "") or (row["model"].startswith("qwen3") and layers % stages):
        each = -(-(layers + 2) // stages)
        sizes = [each - 1, *[each] * (stages - 2)]
        # Likewise `account_for_embedding_in_pipeline_split` of Megatron-Bridge's recipes for Qwen3 235B.
    else:
        sizes = [-(-layers // stages)] * (stages - 1)
    return [*sizes, layers - sum(sizes)]


def _gpu(name: str) -> str | None:
    known = (
        ("A100-40", "a100-40gb"),
        ("A100", "a100-80gb"),
        ("H100-80GB", "h100"),
        ("H200", "h200"),
        ("Trn1", "trn1"),
        ("B200", "b200"),
        ("GB200", "gb200"),
        ("GB300", "gb300"),
    )
    return next((device for start, device in known if name.startswith(start)), None)


def _seconds(values: dict[str, str]) -> float:
    """The step time: as published, or from tokens a second, or from the hardware FLOPs of arXiv:2104.04473."""
    if values["step_time_s"]:
        return float(values["step_time_s"])
    length, batch, devices = int(values["seq"]), int(values["global_batch"]), int(values["n_gpu"])
    if values["tokens_per_s_per_gpu"]:
        return length * batch / (float(values["tokens_per_s_per_gpu"]) * devices)
    if values["tflops_per_gpu"] and "hardware flops" in values["notes"].lower():
        layers, hidden, vocabulary = int(values["layers"]), int(values["hidden"]), int(values["vocab"])
        flops = 96 * batch * length * layers * hidden**2
        flops = flops * (1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden))
        return flops / (float(values["tflops_per_gpu"]) * 1e12 * devices)
    return 0.0


def _program(source: str, values: dict[str, str]) -> ProgramTraits:
    """How the program of a source computes. Megatron-DeepSpeed's pipeline splits messages too (PartitionedTensor)."""
    if _is_nemo(source):
        return replace(
            MEGATRON_CORE,
            graphs="CUDA graphs" in values["notes"],
            tensor_overlap=None if "no user buffers" in values["notes"] else MEGATRON_CORE.tensor_overlap,
            rounding_bytes=_ROUNDING.get(values["precision"], MEGATRON_CORE.rounding_bytes),
            block_scales=values["precision"] == "mxfp8",
        )
    if "Automodel" in source:
        return FULLY_SHARDED
    if "llm-foundry" in source:
        return _composer(values)
    if "bigscience" in source:
        return BIGSCIENCE_FLOAT32 if _REBALANCED in values["notes"] else BIGSCIENCE
    return MEGATRON


def _composer(values: dict[str, str]) -> ProgramTraits:
    """How llm-foundry's scripts of the release in which the row was published call Composer.

    Runs on 128 H100 and more are of January 2024 (`scripts/train/benchmarking/sweep.py`, 5e85bd62d), those in `DEFAULT`
    precision of October 2023 or later, with torch 2.1 (`sweep.sh`, b2a43a147), and those in `PURE` precision of May
    2023, with torch 1.13 (`sweep.sh`, 300cc5c58). torch ends a recompute early since 2.1.
    """
    program = replace(COMPOSER, stops_recompute="DEFAULT" in values["notes"])
    device = values["gpu"][:4]
    if device == "H100" and int(values["n_gpu"]) >= 128 and values["model"] not in ("mpt-13b", "mpt-30b"):
        return replace(program, fused_shares=_FLASH_2_ON_H100, unpads_attention=True)
    return replace(program, fused_shares=_TRITON_SHARES[device])


def _cluster(source: str, gpu: str, devices: int) -> Cluster:
    """The machines of a source, where they differ from those of the device's maker."""
    name = _gpu(gpu)
    assert name is not None
    device: Device = load_device(name)
    if "bigscience" in source:
        device = replace(device, network=DeviceLink(_JEAN_ZAY / shipped_constants().network, 10e-6, "fat tree"))
    if "vTrain" in source:  # `inter_node_bandwidth` of its configurations: 800 Gb/s for 8 devices
        device = replace(device, network=DeviceLink(12.5e9, 10e-6, "fat tree"))
    per_node = min(device.per_node, devices)
    return Cluster(device, -(-devices // per_node), per_node)


def _values(row: dict[str, str]) -> dict[str, object]:
    """The sections of a configuration."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    kv_heads = int(row.get("kv_heads") or heads)
    stages = int(row.get("vpp") or 1)
    common = {
        "vocab_size": int(row["vocab"]),
        "hidden_size": hidden,
        "num_hidden_layers": int(row["layers"]),
        "num_attention_heads": heads,
        "max_position_embeddings": int(row["seq"]),
    }
    if row.get("model", "").startswith("llama"):
        sizes = {"intermediate_size": int(row["ffn"]), "num_key_value_heads": kv_heads, "rope_theta": 10000.0}
        model = {"family": "llama", **common, **sizes}
    elif row.get("model", "").startswith(tuple(_SPARSE)):
        facts = next(facts for name, facts in _SPARSE.items() if row["model"].startswith(name))
        model = {**common, "num_key_value_heads": kv_heads, **facts}
    elif row.get("model", "").startswith("nemotron"):
        # Two matrices of 3 parts multiply as much, and their activation moves as much, as three of 2 parts.
        sizes = {"intermediate_size": int(row["ffn"]) * 2 // 3, "num_key_value_heads": kv_heads, "rope_theta": 10000.0}
        model = {"family": "llama", **common, **sizes}
    elif row.get("model", "").startswith("mpt") or "dropout 0" in row.get("notes", ""):
        no_dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
        model = {"family": "gpt", **common, "intermediate_size": int(row["ffn"]), **no_dropout}
    else:
        model = {"family": "gpt", **common, "intermediate_size": int(row.get("ffn") or 4 * hidden)}
    micro_batches = int(row["global_batch"]) // (int(row["micro_batch"]) * int(row["dp"]))
    interleaved: dict[str, object] = {}
    if stages > 1 and int(row["pp"]) > 1:
        interleaved = {"schedule": "interleaved", "virtual_stages": stages}
    elif micro_batches < int(row["pp"]):
        interleaved = {"schedule": "gpipe"}  # 1F1B with fewer micro-batches than stages, which ours does not have
    # Megatron keeps and reduces gradients in float32 with bfloat16 only, not with float16.
    half = {"gradient": "bfloat16", "reduce": "bfloat16"}
    early = row.get("model", "").startswith("bloom") and _REBALANCED not in row["notes"]
    is_pure = "PURE" in row.get("notes", "")  # of Composer: gradients and their sums in bfloat16
    adds_halves = early or is_pure or row.get("precision", "fp16") == "fp16" or _is_nemo(row.get("source", ""))
    return {
        "model": model,
        "parallel": {
            "tensor": int(row["tp"]),
            "pipeline": int(row["pp"]),
            "sequence": row.get("sp") == "1",
            "vocab_multiple": 128,
            "stages": _stages(row),
            "context": int(row.get("cp") or 1),
            "expert": int(row.get("ep") or 1),
            "context_keys": "gather" if row.get("zero") == "3" else "ring",  # of torch, and of Megatron
            **interleaved,
        },
        "train": {
            "steps": 10,
            "global_batch": int(row["global_batch"]),
            "micro_batch": int(row["micro_batch"]),
            "sequence_length": int(row["seq"]),
            "recompute": row.get("recompute") or "none",
        },
        "optimizer": {"lr": 1e-4, "zero": int(row.get("zero") or 0)},
        "precision": {
            "mode": "mixed",
            "matmul": "fp8" if "fp8" in row.get("precision", "") else None,
            **(half if adds_halves else {}),
        },
    }
