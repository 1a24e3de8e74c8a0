"""The run that a folder holds: with how many ranks it goes on, and where and with which changes, for a dry run."""

from __future__ import annotations

from pathlib import Path

from shardwise.base.errors import ConfigError, StoreError
from shardwise.checkpoint.storage.checkpoint_choice import find_resumable_checkpoints
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.storage.run_identity import earlier_run
from shardwise.config import Config, Layout, resume_changes
from shardwise.optim.learning_rate import learning_rate_change_text
from shardwise.runs.folder import RunDirectory, check_place
from shardwise.runs.layout_spans import layout_spans, short_layout


def continuation_rows(config: Config, layout: Layout | None, run_path: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Rows of a dry run on the run in its folder, none without one, and the reasons why it could not be continued."""
    directory = RunDirectory(run_path)
    try:
        directory.require_folder()
        check_place(run_path)
        earlier = earlier_run(directory, config)
        done = directory.finished_steps()
        steps = config.train.steps
        if earlier is not None and config.checkpoint.resume == "auto" and done is not None and done >= steps:
            return [("continues", f"{run_path}: finished, {done:,} of {steps:,} steps; raise train.steps")], []
        root = Root.of(config.checkpoint.path or directory.checkpoints)
        present = find_resumable_checkpoints(config, root, directory, earlier).candidates
        checkpoint = next((candidate for candidate in present if candidate.problem is None), None)
        if earlier is None and checkpoint is None:
            return [], []
        begin = "from its first step, as it has no checkpoint"
        if checkpoint is not None:
            begin = f"after step {checkpoint.step:,}, from {checkpoint.folder}"
        rows = [("continues", f"{run_path} {begin}")]
        if layout is not None:
            spans = layout_spans(directory.events("start", "resume"))
            text = short_layout(layout.facts())
            # Not among the changed keys: the number of ranks is no key.
            rows += [("  layout", f"{spans[-1].layout} → {text}")] if spans and spans[-1].layout != text else []
    except ConfigError as error:
        return [], error.problems
    except StoreError as error:
        return [], [f"checkpoint.path: {error}" if config.checkpoint.path is not None else str(error)]
    if earlier is None:
        # Another program did the steps.
        return rows, []
    changes = resume_changes(earlier, config.recorded())
    rows += [("  changed", change) for change in changes or ["no key"]]
    if checkpoint is not None:
        moved_end = learning_rate_change_text(
            config.optimizer, config.train.steps, earlier["train"]["steps"], checkpoint.step
        )
        if moved_end is not None:
            rows.append(("  schedule", moved_end))
    return rows, []
