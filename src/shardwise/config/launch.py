"""The section `launch`: how the ranks of a run are started on machines, and wait for one another."""

from __future__ import annotations

import re

from pydantic import Field, ValidationInfo, field_validator

from shardwise.base.redaction import is_secret_variable
from shardwise.config.base_section import LARGEST, Section, reject

_TIME = r"\d+-\d+(?::\d\d){0,2}|\d+(?::\d\d){1,2}"
"""SLURM's forms of a time, but for whole minutes: D-HH:MM:SS, HH:MM:SS, MM:SS."""
_SET_BY = {
    **{name: f"launch.{name}" for name in ("account", "constraint", "gres", "nodes", "partition", "time")},
    **dict.fromkeys(("ntasks", "ntasks-per-node"), "launch.ranks_per_node"),
    **dict.fromkeys(("job-name", "comment", "output", "error"), "--run-dir"),
    "chdir": "the folder that you submit from",
    "signal": "launch.warning_seconds",
}
"""Options of sbatch that the job's script has already, each with what sets it."""
_REFUSED = {
    **dict.fromkeys(("array", "wrap"), "a job is one training: submit each by itself"),
    **dict.fromkeys(("requeue", "no-requeue", "open-mode"), "the job is queued again by itself, and its log goes on"),
    **dict.fromkeys(
        ("clusters", "help", "parsable", "test-only", "usage", "version", "wait"),
        "`shardwise submit` submits one job, follows it, and has --dry-run",
    ),
}
"""Options of sbatch with which it would not start the job that the script is written for, each with a reason."""
_OF_BASH = re.compile(
    "_|BASHOPTS|BASHPID|BASH_(ALIASES|ARGC|ARGV|CMDS|COMMAND|LINENO|SOURCE|SUBSHELL|VERSINFO)|DIRSTACK|EPOCHREALTIME|"
    "EPOCHSECONDS|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|OPTIND|PPID|RANDOM|SECONDS|SHELLOPTS|SRANDOM|UID"
)
"""Variables that bash sets by itself: a script cannot export another value of them."""


class LaunchConfig(Section):
    """The start of a run's ranks and their work together; all keys but `timeout` are for `shardwise submit`."""

    timeout: float = Field(
        default=600.0,
        gt=0,
        description="seconds after which a rank gives up a collective that another does not call; preparing data has "
        "no limit",
    )
    nodes: int | str | None = Field(
        default=None,
        examples=["2-4"],
        description="machines of a submitted job, or a range such as 2-4; null = --nodes must be given",
    )
    ranks_per_node: int | None = Field(
        default=None,
        gt=0,
        description="ranks on each machine; null = one for each GPU of launch.gres, or of the partition's machines; "
        "without GPUs, the ranks of one copy of the model divided over all machines",
    )
    max_restarts: int = Field(
        default=100,
        ge=0,
        description="how often a submitted job starts again after crashes and time limits without a newer checkpoint;"
        " preemptions and lost machines do not count",
    )
    partition: str | None = Field(default=None, description="SLURM's partition; null = the cluster's default")
    account: str | None = Field(default=None, description="SLURM's account; null = the user's default")
    time: str | None = Field(
        default=None,
        examples=["24:00:00", "2-00:00:00"],
        description="SLURM's time limit of each start of the job; null = that of the partition",
    )
    constraint: str | None = Field(default=None, description="features that the machines must have")
    gres: str | None = Field(
        default=None, examples=["gpu:8", "gpu:h100:8"], description="what SLURM reserves on each machine, such as gpu:8"
    )
    exclusive: bool = Field(default=True, description="give the job whole machines")
    # The bounds are those of sbatch's --signal.
    warning_seconds: int = Field(
        default=300,
        ge=1,
        le=65535,
        description="seconds before the time limit at which the job saves and is queued again: enough for a step and "
        "a checkpoint",
    )
    sbatch: tuple[str, ...] = Field(
        default=(), examples=[["--qos=high", "--mail-type=END"]], description="further options of sbatch"
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        examples=[{"NCCL_DEBUG": "WARN"}],
        description="environment variables of the job, which its script shows; secrets belong in your shell, whose "
        "variables it inherits",
    )

    @field_validator("partition", "account", "constraint", "gres", mode="after")
    @classmethod
    def _is_one_word(cls, value: str | None, info: ValidationInfo) -> str | None:
        # Each becomes a line of the job's script, where a second line would be a command.
        if value is not None and (not value or any(not c.isprintable() or c.isspace() for c in value)):
            reject([f"launch.{info.field_name} ({value!r}) must be one word; null leaves it unset"])
        return value

    @field_validator("nodes", mode="before")
    @classmethod
    def _nodes_is_a_number_or_a_range(cls, value: object) -> object:
        """Refuse every other value with one message; pydantic would give two."""
        if value is not None and _range(value) is None:
            shown = repr(value) if isinstance(value, str) else str(value).lower()
            reject([f"launch.nodes ({shown}) must be a number of machines, such as 4, or the fewest and the most, 2-4"])
        return value

    @field_validator("time", mode="before")
    @classmethod
    def _time_is_a_duration(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            # A bare number is minutes to SLURM.
            return f"{value // 60:02d}:{value % 60:02d}:00"
        if value is not None and not (isinstance(value, str) and re.fullmatch(_TIME, value)):
            reject([f"launch.time ({value!r}) must be minutes, HH:MM:SS or D-HH:MM:SS, such as 24:00:00"])
        return value

    @field_validator("sbatch", mode="before")
    @classmethod
    def _sbatch_is_a_list_of_options(cls, value: object) -> object:
        if not isinstance(value, list | tuple) or not all(_is_option(option) for option in value):
            reject([f"launch.sbatch ({value!r}) must be a list of options of sbatch in full, such as [--qos=high]"])
            return ()
        reject([problem for option in value if (problem := _option_problem(option)) is not None])
        return tuple(value)

    @field_validator("environment", mode="before")
    @classmethod
    def _environment_is_a_mapping_of_names(cls, value: object) -> object:
        """YAML reads `1` as a number."""
        if not isinstance(value, dict):
            return value
        # A line break in a text would end its line of the job's script.
        wrong = [name for name, text in value.items() if not _is_variable(name, text)]
        reject([f"launch.environment.{name} must be a variable's name with a text or a number" for name in wrong])
        by_bash = "must be left out: bash, which runs the job's script, sets it"
        reject([f"launch.environment.{name} {by_bash}" for name in value if _OF_BASH.fullmatch(name)])
        secret = [name for name in value if is_secret_variable(name)]
        where = "must be set in your shell, which the job inherits: the script and config.yaml show what is here"
        reject([f"launch.environment.{name} {where}" for name in secret])
        return {name: str(text) for name, text in value.items()}

    @property
    def node_range(self) -> tuple[int, int] | None:
        """The fewest and the most machines; None where the recipe names none."""
        return None if self.nodes is None else _range(self.nodes)


def _range(value: object) -> tuple[int, int] | None:
    # `True` is an int to isinstance, but no number of machines.
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", str(value)) if type(value) in (int, str) else None
    if match is None:
        return None
    fewest = int(match[1])
    most = int(match[2] or match[1])
    return (fewest, most) if 1 <= fewest <= most <= LARGEST else None


def _is_option(value: object) -> bool:
    """True if a value is one option in full: a second one behind a space would not be checked."""
    return isinstance(value, str) and value.isprintable() and re.fullmatch(r"--[a-z][a-z-]*(=.*)?", value) is not None


def _option_problem(option: str) -> str | None:
    # sbatch reads its options by getopt_long, which takes the beginning of a name for the name: `--arr` is `--array`.
    given = option.removeprefix("--").partition("=")[0]
    names = [name for name in (*_SET_BY, *_REFUSED) if name.startswith(given)]
    name = given if given in names else next(iter(names), None)
    if name is None:
        return None
    reason = f"{_SET_BY[name]} sets it" if name in _SET_BY else _REFUSED[name]
    return f"launch.sbatch ({option}) must be without --{name}: {reason}"


def _is_variable(name: object, value: object) -> bool:
    is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).isprintable()
    return is_name and is_plain
