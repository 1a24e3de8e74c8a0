"""Compile all graphs of a training before it starts, on one machine, which can be another than the training's.

One process takes the roles of all ranks in turn: it needs no other rank, no data and no whole model. The number of
graphs depends neither on the number of layers nor on the number of ranks. The training, with compile.enabled=true and
the same keys, takes them from the cache (compile.cache_dir) and compiles nothing; with compile.require_cached=true it
refuses to start if a graph is missing.

A graph is for one kind of device, version of torch, processor and number of threads; the training must have the same.

Exit code 0: all graphs are in the cache; 1: some failed; 2: the input is wrong.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.base import units
from shardwise.base.errors import ConfigError
from shardwise.base.files import cache_root, reason_of, require_replaceable
from shardwise.base.hardware import accelerators, cpu_count, torch_type
from shardwise.base.progress import progress
from shardwise.base.yaml_and_json import whole_number
from shardwise.cli import output
from shardwise.cli.help import add_overrides, add_recipe, count
from shardwise.config import Config, Layout, check_layout, load_config, size_stages_of
from shardwise.train.compile.graph_cache import Facts, GraphCache, graph_key, graph_label

if TYPE_CHECKING:
    from shardwise.train.compile.ahead_of_time import GraphOutcome  # imports torch


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_recipe(parser, is_required=False)
    add_overrides(parser, "parallel.tensor=8")
    add("--cache-dir", metavar="DIR", type=Path, help="folder of graphs, instead of the recipe's compile.cache_dir")
    add("--workers", metavar="N", type=count, help="graphs that are compiled at once (default: one per processor core)")
    threads_help = (
        "threads of each rank of the training (default: OMP_NUM_THREADS, or what `train` gives its ranks here)"
    )
    add("--threads", metavar="N", type=count, help=threads_help)
    add("--nproc", metavar="N", type=count, help="ranks of the training on one machine, as for `train`")
    add("--device", metavar="KIND", help="kind of device, such as cpu or cuda (default: this machine's)")
    add("--capture-only", action="store_true", help="trace all graphs, from tensors without data, and compile none")
    add("--list", action="store_true", help="show the graphs in the cache; without RECIPE nothing is compiled")
    add("--clean", action="store_true", help="remove all graphs from the cache, and compile nothing")
    add("--export", metavar="FILE", type=Path, help="write the cache into one file, after compiling")
    add("--import", metavar="FILE", type=Path, dest="imported", help="add the graphs of such a file")


def run(arguments: argparse.Namespace) -> int:
    recipe: str | None = arguments.recipe
    config = None
    if recipe is not None:
        config = load_config(recipe, [*arguments.overrides, "compile.enabled=true"])
    chosen = arguments.cache_dir or (None if config is None else config.compile.cache_dir)
    cache = GraphCache(chosen or cache_root() / "compile")
    has_action = arguments.list or arguments.clean or arguments.export or arguments.imported
    if config is None and not has_action:
        raise ConfigError("RECIPE must be given, or one of --list, --clean, --export and --import")
    if arguments.export is not None:
        require_replaceable(arguments.export, "--export")
    if arguments.clean:
        number, size = cache.clean()
        output.line(f"removed {units.counted(number, 'graph')}, {units.size(size)}, from {cache.root}")
        return 0
    cache.require_trusted()
    if arguments.imported is not None:
        taken = cache.take_in(arguments.imported)
        output.line(f"{units.counted(len(taken), 'graph')} of {arguments.imported} are in {cache.root}")
    code = 0
    if config is not None:
        if config.train.recompute == "auto":
            raise ConfigError(
                "train.recompute (auto) must be none, selective or full here: its graphs are those of one choice, "
                "which a run makes by the memory of its devices"
            )
        code = _compile(config, cache, arguments)
    if arguments.export is not None:
        try:
            exported = cache.export(arguments.export)
        except OSError as error:
            raise ConfigError(f"--export {arguments.export} cannot be written: {reason_of(error)}") from None
        size = arguments.export.stat().st_size
        output.line(f"{units.counted(len(exported), 'graph')}, {units.size(size)}, are in {arguments.export}")
    if arguments.list:
        _list(cache)
    return code


def _list(cache: GraphCache) -> None:
    entries = cache.entries()
    rows = []
    for entry in entries:
        facts = entry.facts
        shape = f"{facts.get('train.micro_batch', 0)} × {facts.get('train.sequence_length', 0):,}"
        sequence = " + SP" if facts.get("parallel.sequence") else ""
        age = f"{units.duration(max(0.0, time.time() - entry.used))} ago"
        threads = f", {units.counted(facts['threads'], 'thread')}" if "threads" in facts else ""
        where = f"{facts.get('device', '?')}{threads}"
        tensor = f"TP {facts.get('parallel.tensor', '?')}{sequence}"
        size = units.size(entry.bytes)
        torch = facts.get("torch", "?")
        rows.append((_name(facts), tensor, shape, where, torch, entry.path.stem[:12], size, age))
    if rows:
        output.table(rows, ("graph", "tensor", "micro-batch", "device", "torch", "key", "size", "used"))
    total = sum(entry.bytes for entry in entries)
    output.line(f"{units.counted(len(entries), 'graph')}, {units.size(total)}, in {cache.root}")


def _name(facts: Facts) -> str:
    return graph_label(facts["unit"], facts["training"])


def _compile(config: Config, cache: GraphCache, arguments: argparse.Namespace) -> int:
    layout = check_layout(config, arguments.nproc or config.parallel.ranks)
    kind, count = accelerators()
    device = arguments.device or (torch_type(kind) if count else "cpu")
    only_capture = arguments.capture_only
    threads = arguments.threads or _threads(config, layout, device)
    workers = arguments.workers or cpu_count()
    from shardwise.distributed.devices import require_build_for
    from shardwise.train.compile.ahead_of_time import CompilationPlan, compile_graphs

    if device != "cpu" and not accelerators()[1]:
        require_build_for(device)
        only_capture = True
        output.line(f"there is no {device} device here: graphs are captured, and not compiled; one device is enough")
    # Stages share graphs.
    graphs: dict[str, tuple[CompilationPlan, Facts]] = {}
    for stage in size_stages_of(config):
        plan = CompilationPlan.make(stage, layout, device, threads, only_capture=only_capture)
        graphs |= {graph_key(facts): (plan, facts) for facts in plan.facts}
    if not only_capture:
        # Before anything is compiled for a folder that cannot be written.
        cache.require_writable()
    missing = []
    done = failed = 0
    for plan, facts in graphs.values():
        entry = None if only_capture else cache.find(facts)
        # A damaged file is compiled again.
        if entry is None or cache.read(entry) is None:
            missing.append((plan, facts))
        else:
            done += 1
            output.line(f"[{done}/{len(graphs)}] {_name(facts)}: in the cache")
    problems: list[str] = []
    with progress("compiling", len(missing), "graph") as advance:
        for outcome in compile_graphs(missing, cache, workers):
            done += 1
            advance(1)
            if outcome.problem is not None:
                failed += 1
                problems.append(f"{_name(outcome.facts)}: {outcome.problem}")
            output.line(f"[{done}/{len(graphs)}] {_name(outcome.facts)}: {_result(outcome)}")
    # The graphs of this training stay whatever the limit is: it is about to read them.
    removed = cache.prune(config.compile.cache_gib * 2**30, kept=[facts for _, facts in graphs.values()])
    if removed:
        output.line(
            f"removed {units.counted(len(removed), 'graph')} that were used longest ago: compile.cache_gib "
            f"({config.compile.cache_gib:g}) is reached"
        )
    output.line(f"Total graphs: {len(graphs)}")
    output.line(f"Total successful compilations: {0 if only_capture else len(graphs) - failed}")
    output.line(f"Total failed compilations: {failed}")
    if failed and device != "cpu" and not accelerators()[1]:
        problems.append(f"without a {device} device torch cannot capture each backward pass; one device is enough")
    for problem in problems:
        output.line(problem)
    return 1 if failed else 0


def _result(outcome: GraphOutcome) -> str:
    seconds = units.duration(outcome.seconds)
    if outcome.problem is not None:
        return f"failed after {seconds}"
    if outcome.entry is None:
        return f"captured in {seconds}"
    return f"compiled in {seconds}, {units.size(outcome.entry.bytes)}"


def _threads(config: Config, layout: Layout, device: str) -> int:
    if config.is_bit_equal and device == "cpu":
        return config.train.threads
    ranks = layout.world if device == "cpu" else max(1, accelerators()[1])
    return whole_number(os.environ.get("OMP_NUM_THREADS", "")) or max(1, cpu_count() // ranks)
