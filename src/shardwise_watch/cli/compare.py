"""Compare the training losses of two runs, or of a run and a golden curve, over the steps that both have.

A and B are each a run's folder or a file with a loss curve: metrics.jsonl; text, CSV or JSON with one loss a line (from
step 1 on), or with steps and losses; trainer_state.json of transformers; Megatron-LM's golden values; TensorBoard's
event files, or the folder with them. If a step occurs twice, as in a run that was resumed, the last one counts.

The difference of a step is |A - B| / |B|. Exit code 0: no difference is greater than the tolerance; 1: a difference is
greater; 2: there is nothing to compare. With --bits, 1: a loss or a gradient norm differs in any bit, or a hash of the
state if both runs have hashes (log.state_hash_every). Without --bits the hashes are only shown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base import files, units
from shardwise.base.errors import ConfigError, listing, see
from shardwise.cli import output
from shardwise.runs.events import last_event
from shardwise.runs.failure import failure_of
from shardwise.runs.folder import RunDirectory, read_config
from shardwise.runs.layout_spans import layout_spans, spans_text
from shardwise_watch.curves import read_curve, shown
from shardwise_watch.report.numbers import config_differences, difference

if TYPE_CHECKING:
    from shardwise.runs.state_records import StateRecords

_TOLERANCE = 0.01
_ROUNDING = 1e-5
"""Greatest relative difference of the losses of two layouts in float32, before training amplifies it."""
_JUMP = 1e-3
"""Difference at the first step beyond `_ROUNDING` from which on it is no rounding that has grown."""
_LEAST_AGREEING = 3
"""Steps at the beginning that must agree, so that a growth can be told from a difference that was always there."""
_FORMATS = (".png", ".svg")
# Okabe and Ito's blue, vermilion and green, which colour-blind eyes tell apart; a grey for lines that only help.
_COLORS = ("#0072b2", "#d55e00")
_GREEN = "#009e73"
_GREY = "#77797d"
_STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    # Ids of the picture are hashed with this salt, not with a random one: equal curves give equal files.
    "svg.hashsalt": "shardwise",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="a run's folder, or a file with a loss curve")
    parser.add_argument("b", metavar="B", type=Path, help="a run's folder or a file that A is compared with")
    parser.add_argument(
        "--tolerance", metavar="X", type=float, help=f"the greatest difference allowed (default: {_TOLERANCE})"
    )
    parser.add_argument(
        "--loss", metavar="NAME", help="the column, key or scalar of B with the loss (default: one of the usual names)"
    )
    parser.add_argument(
        "--shift", metavar="N", type=int, default=0, help="add N to the steps of B: 1 if B counts them from 0"
    )
    parser.add_argument(
        "--bits",
        action="store_true",
        help="allow no difference in any bit, of losses, gradient norms and state hashes",
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw both curves and their difference (.png, .svg)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    paths = (arguments.a, arguments.b)
    tolerance = _tolerance(arguments)
    plot: Path | None = arguments.plot
    if plot is not None and plot.suffix not in _FORMATS:
        raise ConfigError(f"--plot ({plot}) must end in {listing(_FORMATS, 'or')}")
    a = read_curve(paths[0])
    b = {step + arguments.shift: loss for step, loss in read_curve(paths[1], arguments.loss).items()}
    differences = {step: difference(loss, b[step]) for step, loss in a.items() if step in b}
    if not differences:
        raise ConfigError(f"A and B must have steps in common: {paths[0]} has {_steps(a)}; {paths[1]} has {_steps(b)}")
    if plot is not None:
        _draw(plot, [(f"A: {paths[0]}", a), (f"B: {paths[1]}", b)], differences, tolerance)
    facts = _facts(arguments, a, b, differences, tolerance)
    # The states are shown where both runs have them, and count with --bits.
    if not facts["states"]["steps"] and not arguments.bits:
        del facts["states"]
    if arguments.json:
        output.json(facts)
    else:
        steps = [("A", f"{paths[0]}: {_steps(a)}"), ("B", f"{paths[1]}: {_steps(b)}"), ("both", _steps(differences))]
        output.table([*steps, *_rows(facts, differences)])
    return int(not facts["within"])


def _facts(
    arguments: argparse.Namespace,
    a: Mapping[int, float],
    b: Mapping[int, float],
    differences: Mapping[int, float],
    tolerance: float,
) -> dict[str, Any]:
    """The object of --json; it has "norms" with --bits alone."""
    paths = (arguments.a, arguments.b)
    largest = max(differences, key=differences.__getitem__)
    beyond = [step for step, difference in differences.items() if difference > tolerance]
    runs = [RunDirectory(path) for path in paths]
    are_runs = all(run.config.is_file() for run in runs)
    configs = [read_config(run) for run in runs] if are_runs else []
    may_be_rounding = bool(beyond) and not arguments.bits and not (configs and all(map(_is_bitwise, configs)))
    layouts = [spans_text(layout_spans(run.events("start", "resume"))) for run in runs] if are_runs else None
    records = (None, None) if arguments.shift else tuple(map(_records_of, runs))
    compared = {"norms": _compare_norms(*records)} if arguments.bits else {}
    compared["states"] = _compare_states(*records)
    is_equal = all(result["first_difference"] is None for result in compared.values())
    return {
        "a": str(paths[0]),
        "b": str(paths[1]),
        "steps": len(differences),
        "largest": {"difference": differences[largest], "step": largest, "a": a[largest], "b": b[largest]},
        "tolerance": tolerance,
        "beyond": beyond,
        "within": not beyond and (is_equal or not arguments.bits),
        "final": {name: {"step": max(curve), "loss": curve[max(curve)]} for name, curve in (("a", a), ("b", b))},
        "keys": config_differences(*configs) if are_runs else None,
        "grows_from": _first_of_growth(differences) if may_be_rounding else None,
        "failures": {name: _failure(run) for name, run in zip("ab", runs, strict=True)},
        "layouts": None if layouts is None else dict(zip("ab", layouts, strict=True)),
        **compared,
    }


def _rows(facts: Mapping[str, Any], differences: Mapping[int, float]) -> Iterator[tuple[str, str]]:
    final = ", ".join(
        f"loss {end['loss']:.8g} at step {end['step']:,} in {name.upper()}" for name, end in facts["final"].items()
    )
    largest = "{difference:.3g} at step {step:,}: loss {a:.8g} in A, {b:.8g} in B".format(**facts["largest"])
    yield from (("final", final), ("largest", largest))
    beyond = facts["beyond"]
    if "norms" in facts:
        firsts = [facts[name]["first_difference"] for name in ("norms", "states")]
        differing = [step for step in (*beyond[:1], *firsts) if step is not None]
        counts = f"losses of {units.counted(facts['steps'], 'step')}, gradient norms of {facts['norms']['steps']:,}"
        equal = f"equal to the bit: {counts}, states of {facts['states']['steps']:,}"
        yield "result", f"not equal to the bit, first at step {min(differing):,}" if differing else equal
        yield "norms", _compared_text(facts["norms"], "of both")
    elif beyond:
        steps = units.counted(len(beyond), "step")
        yield "result", f"beyond the tolerance ({facts['tolerance']:g}) at {steps}, first at step {beyond[0]:,}"
    else:
        yield "result", f"within the tolerance ({facts['tolerance']:g})"
    if facts["grows_from"] is not None:
        yield "growth", _growth(differences, facts["grows_from"])
    if "states" in facts:
        yield "states", _compared_text(facts["states"], "with hashes in both")
    yield from (("failed", f"{name.upper()} {failure}") for name, failure in facts["failures"].items() if failure)
    layouts = facts["layouts"] or {"a": "", "b": ""}
    if all(layouts.values()) and layouts["a"] != layouts["b"]:
        yield "layout", f"{layouts['a']} in A; {layouts['b']} in B"
    if facts["keys"] is not None:
        texts = [f"{key}: {shown(json.dumps(a))} in A, {shown(json.dumps(b))} in B" for key, a, b in facts["keys"]]
        # A run whose layout changed had other keys before.
        has_changed = any(", then " in text for text in layouts.values())
        none = "no key differs at the last starts" if has_changed else "no key differs"
        yield from (("" if number else "keys", text) for number, text in enumerate(texts or [none]))


def _tolerance(arguments: argparse.Namespace) -> float:
    """Return the greatest difference of a loss that is allowed: 0 with --bits."""
    tolerance: float | None = arguments.tolerance
    if arguments.bits and tolerance is not None:
        raise ConfigError(f"--tolerance ({tolerance}) must be left out with --bits, which allows no difference")
    if tolerance is None:
        return 0.0 if arguments.bits else _TOLERANCE
    if not 0 <= tolerance < float("inf"):
        raise ConfigError(f"--tolerance ({tolerance}) must be a number from 0, such as 0.01 for 1 %")
    return tolerance


def _first_of_growth(differences: Mapping[int, float]) -> int | None:
    """Return the step from which a difference grows that was no more than rounding before; None if none does so.

    A difference that begins with a jump, or that is no larger at the end than where it began, has another cause.
    """
    steps = sorted(differences)
    first = next((number for number, step in enumerate(steps) if differences[step] > _ROUNDING), 0)
    if first < _LEAST_AGREEING or differences[steps[first]] > _JUMP:
        return None
    return steps[first] if max(differences[step] for step in steps[first:]) > differences[steps[first]] else None


def _growth(differences: Mapping[int, float], grows_from: int) -> str:
    agreeing = [step for step in differences if step < grows_from]
    return (
        f"steps {min(agreeing):,} to {max(agreeing):,} agree within {_ROUNDING:g}, and the difference grows from step "
        f"{grows_from:,}: rounding that training amplifies looks like this; train.bitwise=true tells it from a fault"
        f"{see('training#difference-grows')}"
    )


def _failure(run: RunDirectory) -> str | None:
    """Say where and why the last start of a run failed; None without a failure, or if it is no run's folder."""
    failure = failure_of(run.recorded_failure(), last_event(run.path, "start") or {})
    return None if failure is None else failure.sentence


def _is_bitwise(config: Mapping[str, Any]) -> bool:
    """True if a run adds in one order at every layout: then no difference comes from rounding."""
    train = config.get("train")
    return isinstance(train, Mapping) and train.get("bitwise") is True


def _records_of(run: RunDirectory) -> StateRecords | None:
    """The gradient norms and state hashes of a run; None for a path that is not the folder of one."""
    if not (run.path.is_dir() and run.metrics.exists()):
        return None
    # Costly to import, for folders of runs alone.
    from shardwise.runs.state_records import StateRecords

    return StateRecords.of(run)


def _compare_norms(a: StateRecords | None, b: StateRecords | None) -> dict[str, Any]:
    """The gradient norms of two runs at the steps that both recorded, to the bit."""
    if a is None or b is None:
        return {"steps": 0, "first_difference": None, "not_compared": _missing(a, b)}
    steps = [step for step in a.norms if step in b.norms]
    # A norm that is not a number in both is equal.
    pairs = {step: (repr(a.norms[step]), repr(b.norms[step])) for step in steps}
    first = next((step for step, (norm_a, norm_b) in pairs.items() if norm_a != norm_b), None)
    return {"steps": len(steps), "first_difference": first}


def _compare_states(a: StateRecords | None, b: StateRecords | None) -> dict[str, Any]:
    """The state hashes of two runs at the steps that both have."""
    steps = [] if a is None or b is None else [step for step in a.hashes if step in b.hashes]
    if a is None or b is None or not steps:
        return {"steps": 0, "first_difference": None, "tensors": [], "not_compared": _missing(a, b)}
    from shardwise.runs.state_records import differing_tensors

    first = next((step for step in steps if a.hashes[step].text != b.hashes[step].text), None)
    tensors = [] if first is None else differing_tensors(a.hashes[first], b.hashes[first])
    return {"steps": len(steps), "first_difference": first, "tensors": tensors}


def _missing(a: StateRecords | None, b: StateRecords | None) -> str:
    """The reason why states, or gradient norms, are not compared."""
    if a is None or b is None:
        return "A and B must be folders of runs, without --shift"
    lacking = [name for name, records in (("A", a), ("B", b)) if not records.hashes]
    if not lacking:
        return "no step has hashes in both"
    has = f"{listing(lacking)} {'have' if len(lacking) > 1 else 'has'}"
    return f"{has} no hashes; log.state_hash_every=N records them"


def _compared_text(facts: Mapping[str, Any], which: str) -> str:
    """The result for gradient norms or for states; `which` says at which steps they are compared."""
    if "not_compared" in facts:
        return f"not compared: {facts['not_compared']}"
    if facts["first_difference"] is None:
        return f"equal to the bit at all {units.counted(facts['steps'], 'step')} {which}"
    place = f"differ first at step {facts['first_difference']:,}"
    if "tensors" in facts:
        place += f", in {listing(facts['tensors'], most=3) or 'the place in the data or the seed'}"
    return place


def _steps(curve: Mapping[int, float]) -> str:
    return f"{units.counted(len(curve), 'step')}, {min(curve):,} to {max(curve):,}"


def _draw(
    file: Path, curves: list[tuple[str, Mapping[int, float]]], differences: Mapping[int, float], tolerance: float
) -> None:
    """Draw the curves and, below them, their difference on a logarithmic scale."""
    # Costly to import, for a plot alone.
    from shardwise.base.registered import optional_library

    matplotlib, figures = (
        optional_library(name, "--plot needs", "plot") for name in ("matplotlib", "matplotlib.figure")
    )
    largest = max(differences, key=differences.__getitem__)
    with matplotlib.rc_context(_STYLE):
        figure = figures.Figure(figsize=(8, 6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        # A is broad and pale: it is seen where B covers it.
        for (name, curve), color, width, alpha in zip(curves, _COLORS, (4, 1.2), (0.45, 1), strict=True):
            look = {"color": color, "linewidth": width, "alpha": alpha, "marker": _marker(curve)}
            above.plot([*curve], [*curve.values()], label=name, **look)
        above.set_ylabel("training loss")
        above.legend()
        below.plot([*differences], [*differences.values()], color=_GREEN, linewidth=1.2, marker=_marker(differences))
        label = f"largest: {differences[largest]:.3g} at step {largest:,}"
        below.plot([largest], [differences[largest]], "o", color=_GREEN, label=label)
        below.axhline(tolerance, color=_GREY, linestyle="--", label=f"tolerance: {tolerance:g}")
        if differences[largest] > 0:
            below.set_yscale("log")
        below.set_ylabel("|A − B| / |B|")
        below.set_xlabel("step")
        below.legend()
        try:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {})
        except OSError as error:
            raise ConfigError(f"--plot ({file}) cannot be written: {files.reason_of(error)}") from None


def _marker(curve: Mapping[int, float]) -> str:
    """Dots where steps are few: of a single step a line shows nothing."""
    return "." if len(curve) < 60 else ""
