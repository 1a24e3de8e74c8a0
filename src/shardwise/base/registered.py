"""What the packages beside the core provide, by name: commands, and functions that a key, an option or a command needs.

The core imports none of these packages: a name is resolved when it is used first.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

COMMAND_MODULES = {
    **{name: f"shardwise.cli.{name}" for name in ("plan",)},
    **{name: f"shardwise.cli.{name}" for name in ("ls", "top", "monitor", "report", "compare")},
    **{name: f"shardwise.cli.{name}" for name in ("submit", "jobs", "supervise")},
    **{name: f"shardwise.cli.{name}" for name in ("evaluate", "chat", "converse", "generate")},
    "checkpoint import": "shardwise.cli.checkpoint.import_",
}
"""Modules of the commands, and of the actions of commands, that are not in `shardwise.cli`."""
_FUNCTIONS = {
    "cluster": "shardwise.planner.device_specs:cluster",
    "predicted_step": "shardwise.planner.plan_text:predicted_step",
    "draw_sample": "shardwise.train.generation:draw_sample",
    "evaluate_tasks": "shardwise.train.task_evaluation:evaluate_tasks",
    "cancel_waiting_jobs": "shardwise.launch.slurm.waiting:cancel_waiting_jobs",
}


def provided(name: str) -> Any:
    """The function that is registered by this name; its package is imported by the first use."""
    module, _, function = _FUNCTIONS[name].partition(":")
    return getattr(import_module(module), function)
