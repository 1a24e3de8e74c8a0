"""The script of a job for `sbatch`; each setting stands with its reason.

A text of the user's passes through `in_one_line`, `operand`, `shell` or `_sbatch_header` before it enters a script: it
could end the line that holds it, or be taken for an option.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.base import units
from shardwise.base.errors import ConfigError, see
from shardwise.config import Config
from shardwise_jobs import slurm_commands
from shardwise_jobs.slurm_commands import MARK

_REPLACED = '%\\"'  # characters that SLURM replaces in the path of a log


def ranks_per_node(given: int | None, model_ranks: int, fewest: int, gres: str | None) -> int:
    """Return the number of ranks on each node, on which SLURM reserves `gres`.

    Args:
        given: `launch.ranks_per_node`.
        model_ranks: ranks that hold one copy of the model.
        fewest: fewest nodes of the job.

    Raises:
        ConfigError: neither the configuration nor SLURM tells the number, or they contradict each other.
    """
    devices = slurm_commands.devices_of(gres or "")
    if not devices and re.match("(gpu|neuron)(:|$)", gres or ""):
        raise ConfigError(f"launch.gres ({gres}) must name a whole number of devices, such as gpu:8 or neuron:trn2:16")
    if given and 0 < devices < given:
        raise ConfigError(
            f"launch.ranks_per_node ({given}) must be at most the devices of launch.gres ({gres}), of which there are "
            f"{devices}: each rank has one"
        )
    known = given or devices
    if known:
        return known
    if model_ranks % fewest:
        raise ConfigError(
            "launch.ranks_per_node must be set, or --gres name the devices of a node (gpu:8, neuron:16): the partition "
            f"has none, and one copy of the model ({units.counted(model_ranks, 'rank')}) cannot be cut into {fewest} "
            f"equal parts, one for each node{see('jobs#ranks-of-a-node')}"
        )
    return model_ranks // fewest


@dataclass(frozen=True)
class JobPlan:
    """The job to submit."""

    config: Config
    recipe: str  # a shipped recipe's name, or the path of a file that stays as it is
    overrides: tuple[str, ...]  # `key=value` words after the recipe
    run_path: Path  # absolute path of the run's folder
    directory: Path  # working directory of the job
    nodes: tuple[int, int]  # fewest and most nodes
    ranks_per_node: int
    gres: str | None  # resources that SLURM reserves on each node

    @property
    def node_range(self) -> str:
        fewest, most = self.nodes
        return str(most) if fewest == most else f"{fewest}-{most}"

    @property
    def where(self) -> str:
        plural = "" if self.nodes[1] == 1 else "s"
        return f"{self.node_range} node{plural} × {units.counted(self.ranks_per_node, 'rank')}"


def job_script(job: JobPlan) -> str:
    """Write the script of the job that trains."""
    launch = job.config.launch
    supervise = [*_PROGRAM, "supervise", job.recipe, *job.overrides, "--run-dir", str(job.run_path)]
    supervise += ["--ranks-per-node", str(job.ranks_per_node)]
    lines = [
        "#!/usr/bin/env bash",
        f"# Trains {_name(job)} on {job.where}.",
        "# `shardwise submit` made this file; `sbatch` submits it again, and the run goes on from its last checkpoint.",
        *_options(job, log=job_log(job.run_path)),
        f"#SBATCH --nodes={job.node_range}",
        *([] if launch.exclusive else _shared(job)),
        "# SLURM queues the job again when a node fails or the job is preempted, and the log goes on.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"# {launch.warning_seconds} s before the time limit SLURM sends SIGUSR1: the run saves, and is queued again.",
        f"#SBATCH --signal=B:USR1@{launch.warning_seconds}",
        *_further(launch.sbatch),
        "",
        "# Network: ranks take the interface of the route to the job's first node. To choose another one:",
        "#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0",
        "# NCCL finds InfiniBand by itself. For EFA it needs the plugin aws-ofi-nccl, libnccl-net-ofi.so on",
        "# LD_LIBRARY_PATH, and takes TCP in silence where it finds none; NCCL_DEBUG=INFO tells what it has taken.",
        "#   export NCCL_NET_PLUGIN=ofi FI_PROVIDER=efa",
        "# Threads: each rank has its share of the node's processors. To give it another number:",
        "#   export OMP_NUM_THREADS=8",
        "# NUMA: no rank is bound to some of the processors; Linux keeps its memory near those that it runs on.",
        "# Devices: a rank takes that of its number on the node (LOCAL_RANK).",
        *_exports(job),
        _SUPERVISED.format(command=shlex.join(supervise), restarts=launch.max_restarts),
    ]
    return "\n".join(lines)


def compile_script(job: JobPlan) -> str:
    """Write the script of the job that compiles all graphs on one node, before the training starts."""
    fewest, _ = job.nodes
    world = fewest * job.ranks_per_node
    command = [*_PROGRAM, "compile", job.recipe, *job.overrides, "--nproc", str(world)]
    lines = [
        "#!/usr/bin/env bash",
        f"# Compiles the graphs of {_name(job)} for {world} ranks; `shardwise submit --precompile` made it.",
        "# The training is a job of its own, which SLURM starts when this one has succeeded.",
        *_options(job, log=job.run_path / "logs" / "compile-%j.log"),
        "#SBATCH --nodes=1",
        *_further(job.config.launch.sbatch),
        *_exports(job),
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def job_log(run_path: Path, job: str = "%j") -> Path:
    """Return the path of a job's log; SLURM replaces `%j` by the job's number."""
    return run_path / "logs" / f"job-{job}.log"


_SUPERVISED = """\

# One process supervises the launchers of all nodes. Where it is killed, by a lack of memory for example, it is started
# again and goes on. It gets the signals that SLURM sends to this script; it ignores them while it starts, so each is
# sent until it has ended.
asked=
hand_over() {{ while sleep 0.5 && kill -"$1" "$supervisor" 2> /dev/null; do :; done; }}
supervise() {{
    (trap '' USR1 TERM INT; exec {command} "$@") &
    supervisor=$!
    if [[ $asked ]]; then hand_over "$asked" & fi
    ended=127
    while kill -0 "$supervisor" 2> /dev/null; do wait "$supervisor"; ended=$?; done
    # A signal may have ended the last wait, and the exit code is still to be had, unless bash has forgotten it. No
    # supervisor ends by USR1 or INT: one that ended as they came was killed.
    wait "$supervisor" 2> /dev/null
    again=$?
    if ((again >= 0 && again != 127)); then
        ended=$again
    elif ((ended == 128 + 10 || ended == 128 + 2)); then
        ended=137
    fi
    return "$ended"
}}
for signal in USR1 TERM INT; do trap "asked=\\${{asked:-$signal}}; hand_over $signal &" "$signal"; done
supervise
code=$?
for ((restart = 0; code > 128 && code != 128 + 15 && restart < {restarts}; restart++)); do
    supervise --killed-by "$((code - 128))"
    code=$?
done
exit "$code"
"""
_PROGRAM = (sys.executable, "-P", "-m", "shardwise")


def _options(job: JobPlan, log: Path) -> list[str]:
    launch = job.config.launch
    lines = [
        _sbatch_header("--job-name", _name(job)),
        _sbatch_header("--comment", f"{MARK}{job.run_path}", name="--run-dir"),
        _sbatch_header("--chdir", str(job.directory), name="the current directory"),
        _sbatch_header("--output", str(log), name="--run-dir"),
    ]
    values = {"partition": launch.partition, "account": launch.account, "time": launch.time}
    values |= {"constraint": launch.constraint, "gres": job.gres}
    lines += [
        _sbatch_header(f"--{key}", value, name=f"launch.{key}") for key, value in values.items() if value is not None
    ]
    # SLURM gives a job with whole machines all processors, and of the memory only what it asks for.
    return [*lines, "#SBATCH --exclusive --mem=0"] if launch.exclusive else lines


def _shared(job: JobPlan) -> list[str]:
    """Return the lines of a job without whole machines. With them, SLURM gives the fewest nodes of a range."""
    return [
        "# One launcher starts all ranks of its node, so a node is one task; it has a processor for each rank.",
        f"#SBATCH --ntasks-per-node=1 --cpus-per-task={job.ranks_per_node}",
    ]


def _further(options: Sequence[str]) -> list[str]:
    parts = [option.partition("=") for option in options]
    return [_sbatch_header(name, value if sign else None, name="launch.sbatch") for name, sign, value in parts]


def _exports(job: JobPlan) -> list[str]:
    return [f"export {name}={shlex.join([value])}" for name, value in sorted(job.config.launch.environment.items())]


def _name(job: JobPlan) -> str:
    return in_one_line("--run-dir", job.run_path.name)


_LINE_ENDS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # control characters and other ends of a line


def in_one_line(name: str, text: str) -> str:
    """Return a text for a line of a script; ConfigError, by the user's name of it: it has control characters."""
    if _LINE_ENDS.search(text):
        raise ConfigError(f"{name} ({text!r}) must be without line breaks and other control characters: rename it")
    return text


def operand(name: str, text: str) -> str:
    """Return a text that a program of a job's script cannot take for an option.

    ConfigError: the text is empty, begins with a hyphen, or has spaces or control characters.
    """
    if not text or text.startswith("-") or any(c.isspace() for c in in_one_line(name, text)):
        raise ConfigError(f"{name} ({text!r}) must be one word that does not begin with a hyphen")
    return text


def _sbatch_header(option: str, text: str | None = None, *, name: str | None = None) -> str:
    """Return a line of a script that gives sbatch an option, with quotes around a value that needs them.

    `name`: the user's name of the value. ConfigError: the value does not fit in one line.
    """
    if text is None:
        return f"#SBATCH {option}"
    value = in_one_line(name or option, text)
    if not re.fullmatch(r"[\w@%+=:,./\[\]()*&|!-]+", value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH {option}={value}"
