"""Begin a run from a step of another run: with its weights, optimizer and place in the data, and with changed keys.

For example, a trunk with a constant learning rate is decayed from several of its steps:

    shardwise branch runs/trunk@1000 train.steps=1200 optimizer.decay_steps=200

The branch has the configuration of its parent with the keys that are given. Model, data and seed stay, but a mixture of
data may have other stages, and sources for them, from the step of the branch on. Its folder has links to the files of
the parent's checkpoint, which therefore stay if the parent prunes it. Then the branch trains as with `shardwise train`,
with --nproc. `shardwise train --run-dir FOLDER` continues it after a stop.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.base.errors import ConfigError, StoreError, listing
from shardwise.base.files import write_atomic
from shardwise.base.yaml_and_json import dump_yaml, whole_number
from shardwise.checkpoint.storage.checkpoint_folders import (
    checkpoint_steps,
    link_checkpoint,
    step_name,
    summarize_checkpoint,
)
from shardwise.checkpoint.storage.root import Root
from shardwise.cli import output, train
from shardwise.cli.help import add_overrides
from shardwise.config import (
    Config,
    apply_overrides,
    changed_size_stages,
    check_layout,
    config_from_sections,
    fixed_changes,
    resume_changes,
)
from shardwise.config.base_section import nearest_numbers
from shardwise.launch.environment import joined
from shardwise.runs.folder import RunDirectory, json_text, new_run_path, read_config

if TYPE_CHECKING:
    from shardwise.checkpoint.format.manifest import Manifest

_NEAREST = 4  # steps with a checkpoint that a message names, if there are more
_CHANGEABLE = ("data.mixture", "data.stages")
"""Keys that a run may not change, and a branch may: what was read before its step must stay."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("parent", metavar="RUN@STEP", help="the parent's folder, and the step of a checkpoint (default: the newest)")
    add_overrides(parser, "train.steps=1200", "parent")
    add("--run-dir", metavar="DIR", type=Path, help="the branch's folder (default: runs/RUN-STEP-YYYYMMDD-HHMMSS)")
    add("--nproc", metavar="N", type=int, help="number of local ranks (default: as of `train`)")
    add("--prepare", action="store_true", help="make the folder, and train nothing")


def run(arguments: argparse.Namespace) -> int:
    if joined() is not None:
        raise ConfigError(
            "branch prepares a folder once: call it with --prepare outside of the launcher, then start "
            "shardwise train --run-dir FOLDER in it"
        )
    path, step_text = _parse_parent(arguments.parent)
    parent = RunDirectory(path)
    if not parent.path.is_dir():
        raise ConfigError(f"there is no run {parent.path}: name its folder, as in runs/trunk@1000")
    parent_config = config_from_sections(read_config(parent))
    root = Root.of(parent_config.checkpoint.path or parent.checkpoints)
    manifest = _choose_checkpoint(parent, root, step_text)
    step = manifest.step
    config = _branch_config(parent_config, arguments.overrides, step)
    # A stage must not change what the parent has read.
    if problems := changed_size_stages(manifest.config, config, manifest.step):
        raise ConfigError(problems)
    check_layout(config, train.number_of_ranks(config.parallel, arguments.nproc))
    changes = resume_changes(parent_config.recorded(), config.recorded())
    folder = _new_folder(arguments.run_dir, parent, step)
    try:
        link_checkpoint(root / step_name(step), folder.checkpoints / step_name(step))
        facts = {"parent": str(parent.path.resolve()), "id": parent.stored_id(), "step": step, "changes": changes}
        write_atomic(folder.branch, json_text(facts, indent=2) + "\n")
        # A new id: that of the checkpoint is the parent's.
        folder.id()
        # Last: with its configuration the folder is that of a run.
        folder.write_config(dump_yaml(config.recorded()))
    except BaseException as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        if isinstance(error, StoreError | OSError):
            raise ConfigError(f"the checkpoint of step {step:,} cannot be linked or copied: {error}") from None
        raise
    output.line(f"{folder.path}: a branch of {parent.path} at step {step:,}; {'; '.join(changes) or 'nothing changed'}")
    command = ["train", str(folder.config), "--run-dir", str(folder.path)]
    if arguments.nproc is not None:
        command += ["--nproc", str(arguments.nproc)]
    if arguments.prepare:
        output.line(f"train it: shardwise {' '.join(command)}")
        return 0
    parser = argparse.ArgumentParser()
    train.configure(parser)
    return train.run(parser.parse_args(command[1:]))


def _parse_parent(text: str) -> tuple[Path, str | None]:
    """Return the folder and the step of `RUN@STEP`; a folder's name may have an @ of its own."""
    path, at, step = text.rpartition("@")
    if not at or Path(text).is_dir():
        return Path(text), None
    return Path(path), step


def _choose_checkpoint(parent: RunDirectory, root: Root, text: str | None) -> Manifest:
    try:
        present = checkpoint_steps(root)
        if not present:
            raise ConfigError(f"{parent.path} must have a checkpoint to branch from, and {root} has none")
        step = present[0] if text is None else whole_number(text)
        if step is None or step not in present:
            near = present[:_NEAREST] if step is None else nearest_numbers(step, present)
            raise ConfigError(
                f"the step ({text}) of {parent.path} must have a checkpoint: {listing(near, 'and')} "
                f"{'has' if len(near) == 1 else 'have'} one"
            )
        glanced = summarize_checkpoint(root / step_name(step), step)
    except StoreError as error:
        raise ConfigError(str(error)) from None
    if glanced.manifest is None or glanced.problem is not None:
        raise ConfigError(f"the checkpoint of step {step:,} of {parent.path} must be intact: {glanced.problem}")
    return glanced.manifest


def _branch_config(parent: Config, overrides: list[str], step: int) -> Config:
    values = parent.recorded()
    # These belong to the parent: its place, its end, and a return to one of its steps.
    values["checkpoint"] |= {"path": None, "resume": "auto"}
    values["train"] |= {"stop_after": None, "skip_batches": 0}
    config = config_from_sections(values, apply_overrides(values, overrides))
    changes = fixed_changes(parent.recorded(), config.recorded(), _CHANGEABLE)
    problems = [f"{change}, as in the parent" for change in changes]
    if config.train.steps <= step:
        problems.append(
            f"train.steps ({config.train.steps}) must be more than {step}, the step at which the branch begins: set "
            f"train.steps={step + max(1, parent.train.steps // 10)}, or branch at an earlier step"
        )
    if problems:
        raise ConfigError(problems)
    return config


def _new_folder(path: Path | None, parent: RunDirectory, step: int) -> RunDirectory:
    folder = RunDirectory(path or new_run_path(f"{parent.path.resolve().name}-{step}"))
    folder.require_folder()
    if folder.path.is_dir() and any(folder.path.iterdir()):
        raise ConfigError(
            f"--run-dir ({folder.path}) must be empty or new for a branch: choose another, or continue the run there "
            "by shardwise train"
        )
    return folder.create()
