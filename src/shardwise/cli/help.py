"""The commands in groups, common arguments, and help texts wrapped at words to the width of the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from shardwise.base.registered import COMMAND_MODULES
from shardwise.base.terminal import width_of_prose, wrap_words

COMMAND_GROUPS = {
    "Train": {
        "recipes": "list the shipped recipes, print one, or copy one to edit",
        "data": "fetch, prepare and inspect training data",
        "train": "pretrain a model from a recipe",
        "branch": "start a run from a step of another run, with changed keys",
        "stop": "stop a run after the current step, with a checkpoint",
    },
    "Watch": {
        "ls": "list devices (and who uses them) and runs",
        "top": "watch a run: curve, ranks, pipeline, nodes, events, lost time",
        "monitor": "print the state of a run as JSON, or serve it to Prometheus",
        "report": "HTML report of one run, or of two overlaid",
        "compare": "compare the losses of two runs, or of a run and a golden curve",
        "explain": "explain a message: its cause, and what to do",
    },
    "Use": {
        "evaluate": "loss and perplexity of a model on a text, or its scores on tasks",
        "chat": "talk with a model in the terminal",
        "generate": "continue a text",
        "checkpoint": "inspect, verify, diff, export, import and prune checkpoints",
    },
    "Plan": {
        "plan": "rank the layouts of a recipe on a cluster, before you have it",
        "compile": "compile all graphs of a training before it starts",
        "verify": "prove on this machine that a recipe trains alike at every layout",
        "audit": "replay steps of a run at any layout, and compare them to the bit",
        "doctor": "check this machine and suggest fixes",
    },
    "Cluster": {
        "submit": "submit a training to SLURM and follow it",
        "jobs": "list submitted jobs, show one, or print its log",
    },
}
"""The command line's commands by what they are for, each with a summary."""


RECIPE_HELP = "a shipped recipe's name, or a YAML file; or a model: a hub id, its folder or its config.json"


class HelpFormatter(argparse.HelpFormatter):
    """Wraps every text at words; a paragraph with an indented line keeps its lines."""

    def __init__(self, prog: str, **options: Any) -> None:
        # Python 3.14 and later give further options.
        options.setdefault("width", width_of_prose())
        super().__init__(prog, **options)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(_filled(paragraph, width, indent) for paragraph in text.strip().split("\n\n"))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap_words(text, width)


def module_of(*words: str) -> str:
    """The name of the module of a command, such as `train`, or of its action, such as `checkpoint`, `import`."""
    return COMMAND_MODULES.get(" ".join(words), ".".join(("shardwise.cli", *words)))


def help_of_commands() -> str:
    """The help of `shardwise` itself."""
    options = {"-h, --help": "show this text", "--version": "show the version"}
    return _listed(
        "shardwise COMMAND ...",
        "Pretrain transformer language models across any mesh of devices.",
        {**COMMAND_GROUPS, "Options": options},
        "`shardwise COMMAND --help` says more about a command. `shardwise --completion bash` (or zsh, fish) prints a "
        "script with which the shell completes commands. To begin: `shardwise train quickstart`.",
    )


def help_of_actions(command: str, description: str, actions: Mapping[str, str]) -> str:
    """The help of a command that has actions, such as `data`."""
    usage = f"shardwise {command} ACTION ..."
    return _listed(
        usage, description, {"Actions": actions}, f"`shardwise {command} ACTION --help` says more about an action."
    )


def _listed(usage: str, description: str, groups: Mapping[str, Mapping[str, str]], end: str) -> str:
    width = width_of_prose()
    column = max(len(name) for group in groups.values() for name in group) + 4
    parts = [f"usage: {usage}", _filled(description.strip(), width)]
    for title, group in groups.items():
        lines = [f"{title}:"]
        for name, summary in group.items():
            lines += wrap_words(f"  {name:<{column - 2}}{summary}", width, indent=" " * column)
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, _filled(end, width)])


def _filled(paragraph: str, width: int, indent: str = "") -> str:
    lines = paragraph.splitlines()
    if not any(line.startswith(" ") for line in lines):
        lines = wrap_words(paragraph, width - len(indent))
    return "\n".join(f"{indent}{line}" for line in lines)


# ---- arguments that several commands have


def count(text: str) -> int:
    """The argparse type of a command's options that count: a whole number of at least 1."""
    # Costly to import, which a list of the commands does without.
    from shardwise.base.yaml_and_json import whole_number

    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return number


def add_recipe(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs=None if is_required else "?", help=RECIPE_HELP)


def add_overrides(parser: argparse.ArgumentParser, example: str, owner: str = "recipe") -> None:
    """Add the arguments `key=value`; `owner`: what has the keys that they replace."""
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help=f"replaces a key of the {owner}, such as {example}"
    )


def add_json(parser: argparse.ArgumentParser, of_several: str = "") -> None:
    parser.add_argument("--json", action="store_true", help=f"print one JSON object{of_several}")
