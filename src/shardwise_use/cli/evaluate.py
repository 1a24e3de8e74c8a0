"""Loss and perplexity of a model on any text; for BERT, the losses and accuracies of masked tokens and sentence pairs.

Every token but the first is predicted exactly once: the text is cut into sequences of train.sequence_length tokens that
do not overlap, and the last sequence is padded. A token is predicted from the tokens before it in its sequence: one at
the start of the sequence, train.sequence_length at its end. Neither the number of ranks nor train.micro_batch changes
the result.

With --tasks it prints the scores of tasks of lm_eval instead, as its table.

The text is that of the run, if the checkpoint names it, else the built-in text; data.* keys name another text. These
keys can be set: data.*, parallel.* (except vocab_multiple), precision.mode, train.sequence_length, train.micro_batch,
train.seed (for the masks of BERT), model.family (which must name the class of your own model: its code runs),
model.ignore (fields of config.json that change nothing) and checkpoint.revision (of a hub id).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardwise.base.errors import ConfigError, keys_renamed
from shardwise.base.hardware import accelerators
from shardwise.base.mesh_axes import layout_text
from shardwise.base.units import count
from shardwise.cli import output
from shardwise.config import Config, Layout, check_layout
from shardwise.launch.environment import Rank, is_launched
from shardwise.launch.rank_process import as_rank, check_accelerators, enter_job
from shardwise_use.cli import model_argument
from shardwise_use.cli.model_argument import LAYOUT_KEYS, ModelFolder

if TYPE_CHECKING:
    from shardwise.data.rows import Part
    from shardwise.train.evaluation_losses import EvaluationLosses

KEYS = (
    "data.", *LAYOUT_KEYS, "parallel.sequence", "parallel.context", "parallel.schedule", "parallel.virtual_stages",
    "precision.mode", "train.sequence_length", "train.micro_batch", "train.seed",
    "model.family", "model.ignore", "checkpoint.revision",
)  # fmt: skip
_TASK_KEYS = (
    *LAYOUT_KEYS, "parallel.sequence", "parallel.schedule", "parallel.virtual_stages", "precision.mode",
    "train.sequence_length", "train.micro_batch", "data.tokenizer", "model.family", "model.ignore",
    "checkpoint.revision",
)  # fmt: skip
_TASK_OPTIONS = {
    **model_argument.ARGUMENTS,
    "evaluation.tasks_path": "--tasks-path",
    "evaluation.tasks": "--tasks",
    "evaluation.limit": "--limit",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=model_argument.HELP)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="such as data.path=FILE or parallel.tensor=2")
    part_help = (
        "part of the data (default: the part that data.split holds out; all of data.path if no data.split is given)"
    )
    parser.add_argument("--part", choices=("train", "eval", "test", "all"), help=part_help)
    nproc_help = "number of local ranks (default: those of one copy of the model, or all accelerators)"
    parser.add_argument("--nproc", metavar="N", type=int, help=nproc_help)
    parser.add_argument(
        "--tasks", metavar="NAME,…", help="instead of a text: tasks, groups or tags of lm_eval, by their names"
    )
    parser.add_argument("--tasks-path", metavar="DIR", help="with --tasks: a folder of your own task files (.yaml)")
    parser.add_argument("--limit", metavar="N", type=int, help="with --tasks: examples of each task (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    place = enter_job(arguments.nproc)
    on_tasks = arguments.tasks is not None
    keys, name = (_TASK_KEYS, "evaluate --tasks") if on_tasks else (KEYS, "evaluate")
    values = model_argument.parse_overrides(arguments.overrides, keys, name)
    for option, value in (("--tasks-path", arguments.tasks_path), ("--limit", arguments.limit)):
        if value is not None and not on_tasks:
            raise ConfigError(f"{option} ({value}) needs --tasks, the names of the tasks")
    announce = output.progress if place is None or place.local_rank == 0 else None
    with model_argument.open_model_folder(
        arguments.checkpoint, values, cached=is_launched(), announce=announce
    ) as folder:
        if on_tasks:
            return _evaluate_on_tasks(arguments, place, values, folder, announce)
        part = _part(arguments.part, values, folder)
        world, config = model_argument.evaluation_ranks_and_config(
            lambda replicas: model_argument.evaluation_config(folder, values, replicas, part), place, arguments.nproc
        )
        layout = check_layout(config, world)
        # Once, before the ranks start: each of them then finds data and tokenizer in the cache.
        if not is_launched():
            from shardwise.data.open_data import prepare_data
            from shardwise.data.reading.dataset_tables import fetch_dataset

            if config.data.tokenizer is not None:
                model_argument.tokenizer_of_command(config, folder, announce=announce)
            fetch_dataset(config.data, announce)
            prepare_data(config, announce=announce, any_size=True)
        if place is None:
            check_accelerators(world, accelerators()[1])
            if world > 1:
                return model_argument.launch_command("evaluate", arguments, folder, world, part=part)
        leads = place is None or place.rank == 0
        with as_rank(place) as ending:
            from shardwise_use.inference_jobs import run_evaluation

            with folder, keys_renamed(model_argument.ARGUMENTS):
                # With `all` every document is in the training part.
                read = "train" if part == "all" else part
                evaluation = run_evaluation(config, folder.weights, read, shown=leads)
            if leads:
                facts = _facts(folder, config, layout, part, evaluation)
                if arguments.json:
                    output.json(facts, indent=None)
                else:
                    output.table(_rows(facts))
        return ending.code


def _evaluate_on_tasks(
    arguments: argparse.Namespace,
    place: Rank | None,
    values: dict[str, Any],
    folder: ModelFolder,
    announce: Callable[[str], None] | None,
) -> int:
    if arguments.part is not None:
        raise ConfigError(f"--part ({arguments.part}) must be left out with --tasks, whose files name their data")
    tasks = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    if not tasks:
        raise ConfigError(f"--tasks ({arguments.tasks!r}) must name tasks: --tasks arc_easy,lambada_openai")
    settings = {"tasks": tasks, "tasks_path": arguments.tasks_path, "limit": arguments.limit}
    with keys_renamed(_TASK_OPTIONS):
        world, config = model_argument.evaluation_ranks_and_config(
            lambda replicas: model_argument.tasks_config(folder, values, replicas, settings), place, arguments.nproc
        )
        layout = check_layout(config, world)
        tokenizer = model_argument.tokenizer_of_command(config, folder, cached=is_launched(), announce=announce)
        # Once, before the ranks start: rank 0 then finds the data in the cache.
        if not is_launched():
            from shardwise.data.evaluation_tasks import require_tasks

            require_tasks(config.evaluation, config.model, config.train, Path(str(config.data.tokenizer)))
    if place is None:
        check_accelerators(world, accelerators()[1])
        if world > 1:
            return model_argument.launch_command("evaluate", arguments, folder, world)
    with as_rank(place) as ending:
        from shardwise_use.inference_jobs import run_evaluation_tasks

        with folder, keys_renamed(_TASK_OPTIONS):
            results = run_evaluation_tasks(config, folder.weights, tokenizer, folder.stops(tokenizer))
        if results is not None:
            _print_tasks(arguments, folder, config, layout, results)
    return ending.code


def _print_tasks(
    arguments: argparse.Namespace, folder: ModelFolder, config: Config, layout: Layout, results: dict[str, Any]
) -> None:
    tables = [name for name in ("results", "groups") if name in results]
    if arguments.json:
        facts: dict[str, Any] = {
            "model": folder.name,
            "family": config.model.family,
            **{name: results[name] for name in tables},
            "limit": arguments.limit,
            "layout": layout.facts(),
            "precision": config.precision.resolved(accelerators()[1] > 0).parameter,
        }
        output.json(facts, indent=None)
        return
    from lm_eval.utils import make_table  # type: ignore[import-untyped]

    for name in tables:
        for line in make_table(results, name).splitlines():
            output.line(line)


def _part(chosen: Part | None, values: dict[str, Any], folder: ModelFolder) -> Part | Literal["all"]:
    given: dict[str, Any] = values.get("data", {})
    if chosen is None and not {"path", "blend"}.isdisjoint(given) and "split" not in given:
        return "all"
    _, held_out, test = model_argument.evaluation_config(folder, values, 1, "eval").data.split_weights
    if chosen == "eval" and not held_out:
        raise ConfigError("--part eval: data.split holds nothing out; give its second part a weight, or --part all")
    if chosen == "test" and not test:
        raise ConfigError("--part test: data.split has no test part; give it a third weight, or --part all")
    return chosen or ("eval" if held_out else "all")


def _facts(
    folder: ModelFolder, config: Config, layout: Layout, part: str, evaluation: EvaluationLosses
) -> dict[str, Any]:
    return {
        "model": folder.name,
        "family": config.model.family,
        "data": config.data.name,
        "part": part,
        "loss": evaluation.loss,
        **({} if evaluation.perplexity is None else {"perplexity": evaluation.perplexity}),
        **({} if evaluation.bits_per_byte is None else {"bits_per_byte": evaluation.bits_per_byte}),
        "losses": evaluation.losses,
        **{f"{name}_accuracy": value for name, value in evaluation.accuracies.items()},
        "counted": evaluation.counted,
        "tokens": evaluation.tokens,
        "sequences": evaluation.sequences,
        "sequence_length": config.train.sequence_length,
        "seconds": evaluation.seconds,
        "tokens_per_second": evaluation.tokens / evaluation.seconds,
        "layout": layout.facts(),
        "precision": config.precision.resolved(accelerators()[1] > 0).parameter,
    }


_PARTS = {
    "all": "all of it",
    "eval": "the whole part that data.split holds out (a run itself reads its first train.eval_batches batches)",
    "test": "the test part",
    "train": "the training part",
}
_NAMES = {"mlm": "masked tokens", "nsp": "sentence pairs"}


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    layout = facts["layout"]
    cut = layout_text(layout, sequence=layout["sequence"])
    if "perplexity" in facts:
        bits = f", {facts['bits_per_byte']:.6f} bits per byte" if "bits_per_byte" in facts else ""
        losses = [("perplexity", f"{facts['perplexity']:.6g}{bits}")]
    else:
        losses = [
            (_NAMES[name], f"loss {loss:.6f}, accuracy {facts[f'{name}_accuracy']:.2%} of {facts['counted'][name]:,}")
            for name, loss in facts["losses"].items()
        ]
    size = f"{facts['tokens']:,} in {facts['sequences']:,} sequences of {facts['sequence_length']:,}, each once"
    # Of a model that predicts the next token, what counts are the targets: of conversations, the answers alone.
    unit = "targets" if "perplexity" in facts else "tokens"
    return [
        ("model", f"{facts['model']} ({facts['family']}, {facts['precision']}, {cut})"),
        ("data", f"{facts['data']}, {_PARTS[facts['part']]}"),
        ("loss", f"{facts['loss']:.6f}"),
        *losses,
        (unit, f"{size}; {count(facts['tokens_per_second'])} {unit}/s"),
    ]
