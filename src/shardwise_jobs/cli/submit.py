"""Submit a training to SLURM: check it, show what it needs and the job's script, ask, submit, and follow its log.

Partition, account, time limit and other settings of SLURM are options here, or keys of the recipe's `launch:` block.
The job saves before its time limit and is queued again until the training is done; ranks that die are started again in
the same job (docs/cluster.md). Ctrl-C only stops printing the log; the job continues.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base import units
from shardwise.base.errors import ConfigError, Problems, RunError, listing
from shardwise.base.redaction import redacted
from shardwise.cli import output
from shardwise.cli.help import add_json
from shardwise.cli.train import glance_at_inputs, with_batch
from shardwise.config import Config, Layout, check_layout, load_config, recipe_name, recipe_text, require_data
from shardwise.config.recipe_files import is_model_recipe
from shardwise.estimates.memory import checkpoint_bytes
from shardwise.runs.events import last_recorded_step, newest_checkpoint
from shardwise.runs.folder import RUNS, RunDirectory, new_run_path, run_folder
from shardwise_jobs import slurm_commands, submission
from shardwise_jobs.cli.jobs import follow
from shardwise_jobs.script import JobPlan, compile_script, job_log, job_script, ranks_per_node
from shardwise_plan.device_specs import Cluster, parse_cluster, pipeline_warnings

if TYPE_CHECKING:
    from shardwise_plan.plan import Plan

_KEYS = ("partition", "account", "time", "constraint", "gres")
_TRAINS_TOKENIZER = (
    "all ranks wait while the tokenizer is trained and the text is tokenized: name data.tokenizer, and tokenize the "
    "text before by `shardwise data prepare`"
)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a shipped recipe's name, or a YAML file")
    add("overrides", metavar="key=value", nargs="*", help="replaces a key of the recipe")
    add("--nodes", metavar="N", help="number of machines, or a range such as 2-4 (launch.nodes)")
    add("--device", metavar="DEVICE[:N]", help="the nodes' devices: the step's time and memory are predicted for them")
    for key in _KEYS:
        add(f"--{key}", metavar=key.upper(), help=f"launch.{key}")
    add("--run-dir", metavar="DIR", type=run_folder, help="the run's folder, on a file system of all nodes")
    add("--dry-run", action="store_true", help="print all, and submit nothing")
    add("--write-only", action="store_true", help="write the run's folder with recipe and script, and submit nothing")
    add("-y", "--yes", action="store_true", help="submit without asking")
    add("--detach", action="store_true", help="do not follow the log")
    add("--precompile", action="store_true", help="first submit a job of one node that compiles all graphs")
    add(
        "--rehearse-preemption",
        action="store_true",
        help="interrupt the job after its first steps as a preemption does, show that it resumes, and end it",
    )
    add("--ssh", metavar="HOST[:DIR]", help="submit on HOST, in the same folder or in DIR")
    add_json(parser, " of the job, ask nothing and follow no log")


def run(arguments: argparse.Namespace) -> int:
    if arguments.ssh is not None:
        return _by_ssh(arguments.ssh)
    _check_options(arguments)
    recipe: str = arguments.recipe
    run_path: Path | None = arguments.run_dir
    # A job whose files alone are written may run on another machine, as one that is only shown.
    is_elsewhere = arguments.dry_run or arguments.write_only
    checked = _checked(arguments, load_config(recipe, _overrides(arguments)), is_elsewhere)
    # What only shows the job reserves no folder for it.
    name = run_path or (RUNS / recipe_name(recipe) if arguments.dry_run else new_run_path(recipe))
    job = replace(checked.job, run_path=name.absolute())
    # The job reads the copy of the recipe in its folder: it may wait for days, and the user edits the original.
    job = replace(job, recipe=str(job.run_path / submission.RECIPE))
    try:
        rows, plan = _rows(job, checked)
        rows.append(("files", _files_text(job, arguments)))
        scripts = [compile_script(job), job_script(job)] if arguments.precompile else [job_script(job)]
        facts: dict[str, Any] = {}
        if arguments.json:
            facts = _facts(job, checked.layout, rows, plan) | {"scripts": [*map(redacted, scripts)]}
        else:
            output.table(rows)
            for script in scripts:
                output.line()
                output.raw(redacted(script))
        told = []
        if arguments.write_only:
            script_path = submission.write_inputs(job, scripts[0], recipe_text(recipe))
            facts |= {"written": str(script_path)}
            told = [f"nothing was submitted; submit it by: sbatch {shlex.quote(str(script_path))}"]
        elif not arguments.dry_run and (arguments.yes or _is_wanted()):
            return _submit(job, arguments, facts)
        elif not arguments.dry_run:
            told = ["nothing was submitted"]
        output.answer(facts, told, as_json=arguments.json)
        return 0
    finally:
        if run_path is None and not arguments.dry_run:
            # The folder that was reserved is removed only while it is empty: otherwise a job uses it.
            with contextlib.suppress(OSError):
                name.rmdir()


def _check_options(arguments: argparse.Namespace) -> None:
    if is_model_recipe(arguments.recipe):
        # The files of a model, such as the hub's cache, need not be on the machines of the job.
        raise ConfigError(
            f"RECIPE ({arguments.recipe}) must be a recipe, and it is a model: `shardwise recipes {arguments.recipe} "
            "--write my.yaml` writes the recipe of it"
        )
    if arguments.write_only:
        excluded = ("dry_run", "precompile", "rehearse_preemption")
        if given := [f"--{name.replace('_', '-')}" for name in excluded if getattr(arguments, name)]:
            raise ConfigError(f"--write-only must go without {listing(given)}: it writes the files of one job")
    elif not arguments.dry_run:
        slurm_commands.require()
        if arguments.json and not arguments.yes:
            raise ConfigError("--json must go with -y, --dry-run or --write-only: it asks nothing")
        if not arguments.yes and not sys.stdin.isatty():
            raise ConfigError("-y must be given where no terminal can ask whether to submit")


@dataclass(frozen=True)
class _Checked:
    """A job that can be submitted, but for files that this machine may lack.

    The folder of `job` may change its name, and `layout` is that on the most nodes. `inputs` are rows on data,
    tokenizer and weights, and `warnings` rows on what may go wrong.
    """

    job: JobPlan
    layout: Layout
    notes: list[str]  # on numbers of nodes that cannot be filled, and accelerators without a request
    machines: Cluster | None  # devices that `--device` names; None without it
    inputs: list[tuple[str, str]]
    warnings: list[tuple[str, str]]


def _checked(arguments: argparse.Namespace, config: Config, is_elsewhere: bool) -> _Checked:
    """Check a job; ConfigError: with all problems of data, nodes, layout, batch, folder, disk and files."""
    recipe: str = arguments.recipe
    run_path: Path | None = arguments.run_dir
    folder = (run_path or RUNS / recipe_name(recipe)).absolute()
    problems = Problems()
    checked = None
    # A dry run says in a row that no data are named, as that of `train` does.
    if not arguments.dry_run:
        with problems:
            require_data(config, recipe)
    with problems:
        checked = _with_layout(arguments, config, folder)
        submission.check_memory(config, checked.layout, checked.job.gres)
    with problems:
        submission.check_time_limit(config.launch.time, config.launch.warning_seconds)
    with problems:
        if config.shapes is None:
            from shardwise.models.user_model import check_user_model

            check_user_model(config)
    warnings: list[tuple[str, str]] = []
    with problems:
        submission.check_run_folder(folder)
        needed = 0 if config.checkpoint.path is not None else checkpoint_bytes(config, accelerator=True) or 0
        warnings = _disk_warnings(folder, needed, is_elsewhere)
    inputs, input_problems = glance_at_inputs(recipe, config, run_path)
    if problems or (input_problems and not is_elsewhere):
        raise ConfigError([*problems, *input_problems])
    warnings += [("warning", problem) for problem in input_problems]
    if config.data.tokenizer is None and not config.data.is_built_in:
        from shardwise.data.preview import TRAINED_AT_START

        if any(text.endswith(TRAINED_AT_START) for _, text in inputs):
            warnings.append(("warning", _TRAINS_TOKENIZER))
    assert checked is not None, "nodes or a layout that are refused are a problem"
    return replace(checked, inputs=inputs, warnings=warnings + checked.warnings)


def _with_layout(arguments: argparse.Namespace, config: Config, folder: Path) -> _Checked:
    nodes = config.launch.node_range
    if nodes is None:
        raise ConfigError("--nodes must be given, or launch.nodes in the recipe: a number of machines, or such as 2-4")
    gres = submission.reserved(config.launch)
    machines = None if arguments.device is None else parse_cluster(arguments.device, nodes[1])
    # Where neither the recipe nor SLURM tells the number, `--device h100:8` does.
    is_unknown = config.launch.ranks_per_node is None and gres is None
    if machines is not None and is_unknown:
        ranks = machines.per_node
    else:
        ranks = ranks_per_node(config.launch.ranks_per_node, config.parallel.ranks, nodes[0], gres)
    unasked: list[str] = []
    if gres is None and not slurm_commands.answers():
        gres = _accelerators(arguments.device, machines, ranks)
        asked = "no accelerators; --gres gpu:8 or --device h100:8 names those of a node"
        asked = f"{gres} on each node, by --device; --gres names other ones" if gres else asked
        unasked = [f"no sinfo answers here, which lists the accelerators of the partition: the job asks for {asked}"]
    layout, notes = submission.check_node_counts(
        config, nodes, ranks, lambda candidate, world: with_batch(candidate, world, arguments.run_dir)
    )
    if arguments.precompile:
        # The graphs are compiled for the fewest nodes.
        fewest = nodes[0] * ranks
        check_layout(with_batch(config, fewest, arguments.run_dir), fewest)
    job = JobPlan(config, arguments.recipe, tuple(_overrides(arguments)), folder, Path.cwd(), nodes, ranks, gres)
    warnings = [] if machines is None else _fewer_devices(arguments.device, machines, gres)
    return _Checked(job, layout, [*notes, *unasked], machines, [], warnings)


def _accelerators(device: str | None, machines: Cluster | None, ranks: int) -> str | None:
    """The resources of a node with the devices that the user names, of which SLURM cannot be asked here."""
    if machines is None or device is None or not machines.device.is_accelerator:
        return None
    count = max(ranks, machines.per_node) if device.endswith(f":{machines.per_node}") else ranks
    # Chips of several devices are those of AWS.
    chips = math.ceil(count / machines.device.per_chip)
    return f"gpu:{count}" if chips == count else f"neuron:{chips}"


def _fewer_devices(device: str, machines: Cluster, gres: str | None) -> list[tuple[str, str]]:
    devices = slurm_commands.devices_of(gres or "")
    if not devices or devices >= machines.per_node or not device.endswith(f":{machines.per_node}"):
        return []
    text = (
        f"launch.gres ({gres}) reserves fewer devices on a node than --device ({device}) names: the prediction is for "
        f"{units.counted(devices, 'rank')} on each node"
    )
    return [("warning", text)]


def _rows(job: JobPlan, checked: _Checked) -> tuple[list[tuple[str, str]], Plan | None]:
    layout = checked.layout
    machines = checked.machines
    accelerator = None if machines is None else machines.device.is_accelerator
    rows = submission.rows(job, layout, checked.notes, accelerator)
    warnings = [*checked.warnings, *pipeline_warnings(f"{job.gres} {machines}", layout.pipeline)]
    warnings += job.config.optimizer.long_warmup(job.config.train.steps)
    plan = None
    if machines is not None:
        from shardwise_plan.cli.wording import published_error_text, time_range_text
        from shardwise_plan.plan import predict_layout
        from shardwise_plan.prediction_text import memory_fit_text, predicted_rows

        config = with_batch(job.config, layout.world, None)
        plan = predict_layout(config, layout, replace(machines, per_node=job.ranks_per_node))
        rows += [("device", str(machines)), *predicted_rows(plan)]
        if plan is not None and (ranges := time_range_text(plan)):
            rows.append(
                ("  range", f"{ranges} on the calendar, {published_error_text(plan)}: so far are published steps off")
            )
        limit = job.config.launch.time
        if plan is not None and limit is not None:
            rows.append(("  starts", _starts(job, layout, limit, plan.seconds)))
        if plan is not None and plan.headroom < 0:
            warnings.append(("warning", f"memory {memory_fit_text(plan)}"))
    return [*rows, *checked.inputs, *warnings], plan


def _facts(job: JobPlan, layout: Layout, rows: list[tuple[str, str]], plan: Plan | None) -> dict[str, Any]:
    from shardwise_plan.prediction_text import plan_facts

    limit = job.config.launch.time
    return {
        "run": str(job.run_path),
        "nodes": job.nodes,
        "ranks_per_node": job.ranks_per_node,
        "layout": asdict(layout) | {"data": layout.data, "zero": job.config.optimizer.zero},
        "time_limit_seconds": None if limit is None else slurm_commands.seconds(limit),
        "prediction": None if plan is None else plan_facts(plan),
        "rows": [{"name": name.strip(), "text": text} for name, text in rows],
        "warnings": [text for name, text in rows if name == "warning"],
        **dict.fromkeys(("written", "job", "compile_job", "log", "resumed_step")),
    }


def _starts(job: JobPlan, layout: Layout, limit: str, seconds: float) -> str:
    usable = slurm_commands.seconds(limit) - job.config.launch.warning_seconds
    node_hours = seconds / 3600 * layout.world / job.ranks_per_node
    starts = units.counted(math.ceil(seconds / usable), "start")
    return f"about {starts} of {limit}, {node_hours:,.0f} node-hours for the steps alone"


def _files_text(job: JobPlan, arguments: argparse.Namespace) -> str:
    text = f"{submission.RECIPE}, {submission.SCRIPT} and logs/ in the folder of the run"
    if not arguments.dry_run:
        return text
    named = "" if arguments.run_dir is not None else f", whose name will end in the time: {job.run_path.name}-…"
    return f"{text}{named}; a dry run writes none, --write-only writes them without submitting"


def _disk_warnings(folder: Path, needed: int, is_elsewhere: bool) -> list[tuple[str, str]]:
    """Check that a run's disk has room for `needed` bytes; return what is wrong for a job that may run elsewhere."""
    try:
        submission.check_disk(folder, needed)
    except ConfigError as error:
        if not is_elsewhere:
            raise
        return [("warning", f"on this machine: {error}")]
    return []


def _is_wanted() -> bool:
    try:
        return input("submit? [y/n] ").strip().lower() in ("y", "yes")
    except EOFError:
        output.line()
        return False


def _overrides(arguments: argparse.Namespace) -> list[str]:
    options = {key: getattr(arguments, key) for key in ("nodes", *_KEYS)}
    return [*arguments.overrides, *(f"launch.{key}={value}" for key, value in options.items() if value is not None)]


def _submit(job: JobPlan, arguments: argparse.Namespace, facts: dict[str, Any]) -> int:
    """Write the run's folder and submit what it holds; with `--json` sentences are messages."""
    say = output.progress if arguments.json else output.line
    script = submission.write_inputs(job, job_script(job), recipe_text(arguments.recipe))
    options = []
    compiling = None
    try:
        if arguments.precompile:
            compiling = slurm_commands.submit(compile_script(job))
            submission.record(job.run_path, compiling, "compile")
            say(f"job {compiling} compiles all graphs first; its log: {job.run_path}/logs/compile-{compiling}.log")
            # By the second option SLURM cancels a training whose compilation failed, which else would wait for ever.
            options = [f"--dependency=afterok:{compiling}", "--kill-on-invalid-dep=yes"]
        number = slurm_commands.submit(script.read_text(encoding="utf-8", errors="surrogateescape"), options)
    except ConfigError:
        # SLURM refuses the training: without it the graphs are of no use.
        if compiling is not None:
            with contextlib.suppress(RunError):
                slurm_commands.cancel(compiling)
        if arguments.run_dir is None:
            shutil.rmtree(job.run_path)
        raise
    submission.record(job.run_path, number, "train")
    RunDirectory(job.run_path).mark_latest()
    log = job_log(job.run_path, number)
    say(f"job {number}; its log: {log}")
    if arguments.rehearse_preemption:
        facts["resumed_step"] = rehearse(number, job.run_path, say)
    elif not (arguments.detach or arguments.json):
        follow(log, number, job.run_path)
    if arguments.json:
        output.json({**facts, "written": str(script), "job": number, "compile_job": compiling, "log": str(log)})
    return 0


def _by_ssh(where: str) -> int:
    host, _, folder = where.partition(":")
    # In HOST:~/DIR the home is where ssh starts.
    folder = folder.removeprefix("~/")
    # The words as the user gave them, but for `--ssh HOST` and `--ssh=HOST`: the other machine submits by itself.
    given = sys.argv[sys.argv.index("submit") + 1 :]
    pairs = zip(["", *given], given, strict=False)
    kept = [word for before, word in pairs if "--ssh" not in (before, word) and not word.startswith("--ssh=")]
    command = submission.ssh_command(host, kept, Path(folder) if folder else Path.cwd())
    try:
        return subprocess.run(command, check=False, env=os.environ).returncode
    except FileNotFoundError:
        raise ConfigError("ssh must be on the PATH for --ssh") from None


_POLL_SECONDS = 0.5
_TRAIN_SECONDS = 3600.0
_QUEUE_SECONDS = 3600.0
_ASK_SECONDS = 5.0


def rehearse(job: str, run_path: Path, say: Callable[[str], None] = output.line) -> int:
    """Interrupt a job after its first steps, wait until it has resumed, end it, and return the step it resumed from.

    RunError: the job did not train, was not queued again, or did not resume.
    """
    _await(lambda: last_recorded_step(run_path) > 0, job, _TRAIN_SECONDS, "take a first step")
    say(f"job {job} trains; now it gets SIGUSR1, as before a preemption")
    slurm_commands.warn(job)
    _await(lambda: slurm_commands.restarts(job) > 0, job, _TRAIN_SECONDS, "be queued again")
    saved = newest_checkpoint(run_path)
    say(f"it saved step {saved:,} and was queued again")
    resumed = RunDirectory(run_path)
    asked = time.monotonic()

    def has_resumed() -> bool:
        nonlocal asked
        if time.monotonic() - asked > _ASK_SECONDS:
            slurm_commands.start_early(job)
            asked = time.monotonic()
        return any(True for _ in resumed.events("resume"))

    _await(has_resumed, job, _QUEUE_SECONDS, "resume")
    event = list(resumed.events("resume"))[-1]
    slurm_commands.cancel(job)
    if event["step"] != saved:
        raise RunError(f"job {job} resumed after step {event['step']:,}, and had saved step {saved:,}")
    say(f"it resumed after step {saved:,}: a preemption costs this run no step. The job was ended")
    return saved


def _await(condition: Callable[[], bool], job: str, seconds: float, action: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RunError(f"job {job} did not {action} within {seconds:,.0f} s; it goes on")
        if not slurm_commands.jobs(user=False, ids=[job]):
            raise RunError(f"job {job} ended before it could {action}; `shardwise jobs log {job}` says why")
        time.sleep(_POLL_SECONDS)
