"""Look at checkpoints, verify them, compare them, export and import them, and remove old ones."""

from __future__ import annotations

import argparse
import importlib
import keyword

ACTIONS = {
    "inspect": "show what a checkpoint holds, or list a run's checkpoints",
    "verify": "read a checkpoint whole: checksums, completeness, values that are not finite",
    "export": "write a checkpoint as a plain Hugging Face folder",
    "import": "make a checkpoint of Hugging Face weights, or of Megatron-LM's or neuronx-distributed's shards",
    "prune": "remove old checkpoints of a run",
    "diff": "compare two checkpoints or Hugging Face folders, tensor by tensor",
}
"""Each has a module of its name in this package, with an underscore behind a name that Python keeps for itself."""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, title="actions")
    for name, summary in ACTIONS.items():
        module = importlib.import_module(f"{__name__}.{name}{'_' * keyword.iskeyword(name)}")
        action = actions.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(action)
        action.set_defaults(call=module.run)


def run(arguments: argparse.Namespace) -> int:
    code: int = arguments.call(arguments)
    return code
