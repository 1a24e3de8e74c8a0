"""Names that the packages beside the core provide: commands, and functions that a key, an option or a command needs.

The core imports none of these packages: a name is resolved when it is used first.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_COMMANDS = {
    "shardwise_plan": ("plan",),
    "shardwise_watch": ("ls", "top", "monitor", "report", "compare"),
    "shardwise_jobs": ("submit", "jobs", "supervise"),
    "shardwise_use": ("evaluate", "chat", "converse", "generate"),
}
COMMAND_MODULES = {
    **{name: f"{package}.cli.{name}" for package, names in _COMMANDS.items() for name in names},
    "checkpoint import": "shardwise_use.cli.import_",
}
"""Modules of the commands, and of the actions of commands, that are not in `shardwise.cli`."""
_FUNCTIONS = {
    "cluster": "shardwise_plan.device_specs:cluster",
    "predicted_step": "shardwise_plan.plan_text:predicted_step",
    "draw_sample": "shardwise_use.generation:draw_sample",
    "evaluate_tasks": "shardwise_use.task_evaluation:evaluate_tasks",
    "cancel_waiting_jobs": "shardwise_jobs.jobs:cancel_waiting_jobs",
}


def provided(name: str) -> Any:
    """The function that is registered by this name; its package is imported by the first use."""
    module, _, function = _FUNCTIONS[name].partition(":")
    return getattr(import_module(module), function)
