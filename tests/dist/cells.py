"""One array of trainings in which every two choices of layout, model and method meet, and what is measured of each.

Each cell is trained once, on its ranks, and answers all questions of `test_cells.py`.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor

from shardwise.config import Config, Schedule
from shardwise.config.pipeline_schedule_specs import SCHEDULES
from shardwise.distributed.mesh import Mesh
from shardwise.train.build import build_trainer
from shardwise.train.model_checks import check_replicas
from shardwise.verify.canonical_values import canonical_weights, step_with_gradients
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import FACTS, FAMILIES, MODELS, SPARSE, cases, make_config, make_data, sizes, uncount

EVAL_BATCHES = 2
STEPS = 2
"""Of each cell: the evaluation that follows sees the second update."""
CURVE, LONG = 8, 20
"""Steps of the cells that show that small differences do not grow; of the slow test."""
END = 3
"""The token that ends a document."""
RANKS = 4
GRAIN = 8
"""Parts of the sums over a cut dimension, of cells with `bitwise`: more than there are ranks."""

DROPOUT: dict[str, Sequence[str]] = MODELS["dropout"] | dict.fromkeys(
    ("llama", *FACTS, *SPARSE), ("attention_dropout",)
)
OBJECTIVES = {"router_sequence_loss": 0.1, "router_batch_loss": 0.1, "router_z_loss": 0.01}
"""All that micro-batches and ranks of a sparse model add up."""
VARIANTS, OPTIMIZERS = MODELS["variants"], cases("optimizers")
"""Another model of the family: shared K/V heads, ties, biases, residuals one after the other."""
Sent = Counter[tuple[str, str]]
"""Bytes or calls, by (axis, kind)."""


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        family: of FAMILIES, FACTS or SPARSE. variant: whether it is that of VARIANTS.
        documents: documents end within samples, and see nothing of each other. uneven: samples count differently many
            targets.
        bitwise: with `train.bitwise`. data_grain: `train.data_grain`. context_grain: `parallel.context_grain`.
        schedule: of the pipeline, where there is one.
        dropout: with masks that do not depend on the layout.
        regathers: with `parallel.sequence_regather`.
        batch: `train.global_batch`. mode, matmul: of `precision`. stages: blocks of each stage, where they are named.
            The others are configuration keys.
    """

    family: str = "llama"
    variant: bool = False
    documents: bool = False
    uneven: bool = False
    bitwise: bool = False
    data_grain: int | None = None
    context_grain: int | None = None
    schedule: str = "none"
    pipeline: int = 1
    tensor: int = 1
    sequence: bool = False
    overlap: str | None = None
    regathers: bool = False
    data: int = 1
    zero: int = 0
    optimizer: str = "adamw"
    recompute: str = "none"
    context: int = 1
    context_keys: str = "gather"
    expert: int = 1
    dropout: bool = False
    mode: str = "float32"
    matmul: str | None = None
    layers: int = 4
    batch: int = 8
    stages: tuple[int, ...] | None = None
    vocab_multiple: int = 1

    @property
    def world(self) -> int:
        return self.pipeline * self.tensor * self.context * self.data

    @property
    def micro_batch(self) -> int:
        """Samples at once: one process takes all, but in bfloat16 one, so that it rounds each as a pipeline does.

        With `bitwise` it does not depend on the layout, nor with fp8, whose scales are those of a micro-batch: its 16
        tokens on each of two ranks that share samples are the fewest that fp8 takes.
        """
        if self.bitwise or self.matmul is not None:
            return 2
        if self.world == 1:
            return self.batch if self.mode == "float32" else 1
        return 1 if self.pipeline > 1 else 2

    @property
    def is_possible(self) -> bool:
        """Whether it is a training, and none that another cell is too."""
        model = (not self.variant or self.family in VARIANTS) and not (
            self.family == "bert" and (self.documents or self.uneven)
        )
        cut = (self.schedule == "none") == (self.pipeline == 1) and 1 < self.world <= RANKS
        tensor = (self.tensor > 1 or not (self.sequence or self.overlap)) and not (
            self.overlap and self.schedule != "none" and SCHEDULES[self.schedule].splits_backward
        )
        context = (self.context_keys == "gather") if self.context == 1 else self.family != "bert"
        return model and cut and tensor and context and (self.data * self.context > 1 or not self.zero)

    @property
    def name(self) -> str:
        cut = [
            f"{axis}{degree}"
            for axis, degree in (("tp", self.tensor), ("cp", self.context), ("dp", self.data), ("ep", self.expert))
            if degree > 1
        ]
        if self.pipeline > 1:
            cut.insert(0, f"{self.schedule}{self.pipeline}")
        said = [self.family, "variant" if self.variant else "", *cut, "sp" if self.sequence else "", self.overlap or ""]
        said += [
            f"zero{self.zero}" if self.data * self.context > 1 else "",
            self.optimizer if self.optimizer != "adamw" else "",
        ]
        said += [self.recompute if self.recompute != "none" else "", self.mode if self.mode != "float32" else ""]
        said += [self.matmul or "", self.context_keys if self.context_keys != "gather" else ""]
        flags = ("regathers", "dropout", "documents", "uneven", "stages", "bitwise", "data_grain", "context_grain")
        said += [flag for flag in flags if getattr(self, flag)]
        return "-".join(word for word in said if word)

    @property
    def alone(self) -> Cell:
        """The same training in one process, as one micro-batch."""
        one = Cell()
        return replace(self, **{name: getattr(one, name) for name in _OF_LAYOUT})


_OF_LAYOUT = (
    "schedule", "pipeline", "stages", "tensor", "sequence", "overlap", "vocab_multiple", "data", "context",
    "context_keys", "expert", "zero", "recompute", "regathers",
)  # fmt: skip

AXES: Mapping[str, Sequence[Any]] = cases("axes") | {
    "family": tuple(FAMILIES),
    "schedule": ("none", *get_args(Schedule)),
}
_INDEPENDENT = (
    ("family", "variant", "documents", "uneven"),
    ("schedule", "pipeline", "tensor", "sequence", "overlap", "context", "context_keys", "data", "zero"),
)
"""Choices that limit each other; choices of two different groups, and all others, go together in any way."""

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(cell: Cell) -> set[Pair]:
    """Every two choices that meet in a cell."""
    return _pairs(vars(cell))


def _pairs(values: Mapping[str, Any]) -> set[Pair]:
    return set(itertools.combinations([(name, values[name]) for name in AXES], 2))


@functools.cache
def _choices() -> tuple[list[dict[str, Any]], ...]:
    """For each group of choices that limit each other, those that are possible."""
    found = []
    grouped = [name for group in _INDEPENDENT for name in group]
    for group in (*_INDEPENDENT, *((name,) for name in AXES if name not in grouped)):
        base = Cell(data=2) if "data" not in group else Cell()
        options = [dict(zip(group, values, strict=True)) for values in itertools.product(*(AXES[n] for n in group))]
        found.append([option for option in options if replace(base, **option).is_possible])
    return tuple(found)


def possible_pairs() -> set[Pair]:
    """Every two choices that can meet."""
    order = {name: place for place, name in enumerate(AXES)}
    found: set[Pair] = set()
    for one, other in itertools.combinations_with_replacement(_choices(), 2):
        for a, b in itertools.product(one, other) if one is not other else ((option, option) for option in one):
            for first, second in itertools.product(a.items(), b.items()):
                if order[first[0]] < order[second[0]]:
                    found.add((first, second))
                elif order[first[0]] > order[second[0]]:
                    found.add((second, first))
    shared = (("context", 2), ("context", 4), ("context_keys", "ring"))
    impossible = {*((("family", "bert"), choice) for choice in shared), (("context_keys", "ring"), ("dropout", True))}
    return found - impossible


def _drawn(generator: random.Random) -> dict[str, Any]:
    """The choices of a cell; a cell itself takes longer to make."""
    values: dict[str, Any] = {}
    for options in _choices():
        values |= generator.choice(options)
    if values["family"] == "bert" and values["context"] > 1:
        # Its tokens attend to later ones.
        values |= {"data": values["data"] * values["context"], "context": 1, "context_keys": "gather"}
    if values["context_keys"] == "ring":
        # No kernel drops probabilities of the keys of a rank.
        values["dropout"] = False
    return values


def cells_of(test: str) -> list[Cell]:
    rows: list[dict[str, Any]] = cases(test)
    return [Cell(**row | ({"stages": tuple(row["stages"])} if "stages" in row else {})) for row in rows]


def small(*cells: Cell) -> tuple[Cell, ...]:
    """The cells with few blocks and samples, since each collective of tensor parallelism takes milliseconds.

    A pipeline rank has two stages at least, and a pipeline of n ranks 2n micro-batches, which DualPipeV needs. Other
    ranks have two micro-batches.
    """
    blocks = {1: 2, 2: 4, 4: 8}
    return tuple(
        replace(cell, layers=blocks[cell.pipeline], batch=8 if cell.data > 1 or cell.pipeline > 2 else 4)
        for cell in cells
    )


@functools.cache
def array() -> tuple[Cell, ...]:
    """Few cells in which every two choices that can meet do: the best of some drawn ones, again and again."""
    generator, missing, found = random.Random(5), possible_pairs(), list[Cell]()
    while missing:
        best = max((_drawn(generator) for _ in range(400)), key=lambda values: len(_pairs(values) & missing))
        met = _pairs(best) & missing
        if met:
            found += small(Cell(**best))
            missing -= met
    return tuple(found)


def chosen(cell: Cell) -> set[tuple[str, Any]]:
    return {(name, getattr(cell, name)) for name in AXES}


def sweep(count: int) -> list[Cell]:
    """Other cells, drawn."""
    generator, found = random.Random(1), dict[Cell, None]()
    while len(found) < count:
        (cell,) = small(Cell(**_drawn(generator)))
        if cell not in array():
            found[cell] = None
    return list(found)


def pipelines() -> list[Cell]:
    """The whole matrix of schedules, degrees, stages of ZeRO and tied weights, up to 8 ranks."""
    models = (("gpt", False), ("gpt", True), ("llama", False), ("llama", True), ("bert", False))
    degrees = itertools.product(get_args(Schedule), (2, 4), (1, 2), (0, 1))
    cells = [
        Cell(*model, schedule=schedule, pipeline=p, tensor=t, sequence=t > 1, data=zero + 1, zero=zero)
        for (schedule, p, t, zero), model in itertools.product(degrees, models)
    ]
    return [replace(c, layers=8, batch=max(8, 2 * c.pipeline * c.data)) for c in cells if c.world <= 8]


COVERING = small(*cells_of("covering cells"))
EIGHT_RANKS = small(*cells_of("cells of eight ranks"))


@dataclass
class Measured:
    """What one rank measured.

    Attributes:
        losses, norms: of every step.
        before: evaluation before the first step; None in a job. after: after the last step.
        place: the rank's pipeline rank, its rank among those with the same part of the model, and its tensor rank.
        step, evaluation: bytes sent, by (axis, kind), and `calls` how often.
        state: bytes of parameters, gradients, optimizer state, and of the padding in that.
        weights, gradients: at step 0, and of step 1, by canonical name; on one rank of each pipeline stage.
    """

    losses: list[float]
    norms: list[float]
    before: tuple[float, float] | None
    after: tuple[float, float]
    place: tuple[int, int, int]
    step: Counter[tuple[str, str]]
    evaluation: Counter[tuple[str, str]]
    calls: Counter[tuple[str, str]]
    state: dict[str, int]
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


_PARALLEL = ("tensor", "context", "context_keys", "expert", "sequence", "vocab_multiple", "context_grain")


def configuration(cell: Cell) -> Config:
    model = (
        sizes(layers=cell.layers, spread=0.05)
        | (FAMILIES | FACTS | SPARSE)[cell.family]
        | (VARIANTS[cell.family] if cell.variant else {})
    )
    if cell.family == "smollm3":
        model["no_rope_layers"] = [1, 0] * (cell.layers // 2)
    data = {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True, "eod_token": END}
    return make_config(
        model=model | dict.fromkeys(DROPOUT[cell.family], 0.1 if cell.dropout else 0.0),
        parallel={name: getattr(cell, name) for name in _PARALLEL}
        | {
            "tensor_overlap": cell.overlap,
            "sequence_regather": cell.regathers,
            "grain": GRAIN // (cell.context_grain or 1),
        }
        | ({"pipeline": cell.pipeline, "schedule": cell.schedule, "stages": cell.stages} if cell.pipeline > 1 else {}),
        train={
            "global_batch": cell.batch,
            "micro_batch": cell.micro_batch,
            "eval_batches": EVAL_BATCHES,
            "recompute": cell.recompute,
            "bitwise": cell.bitwise,
            "data_grain": cell.data_grain,
            "dropout_mode": "invariant" if cell.dropout else "fast",
        },
        optimizer={"zero": cell.zero, "bucket_mib": 0.02, "warmup_steps": 1}
        | OPTIMIZERS[cell.optimizer]
        | (OBJECTIVES if cell.family in SPARSE else {}),
        precision={"mode": cell.mode, "matmul": cell.matmul},
        data=data if cell.documents else {},
    )


def measure(cell: Cell, steps: int) -> Measured:
    """Train a cell on this rank."""
    torch.set_num_threads(1)
    config = configuration(cell)
    mesh = shared_mesh(cell.tensor, cell.pipeline, context=cell.context)
    data = make_data(config.model.vocab_size, samples=64, pairs="nsp" in config.model.objectives)
    sentences = dict.fromkeys(data.sentences, data.sentences["train"]) if data.sentences else data.sentences
    trainer = build_trainer(
        config, mesh, replace(data, tokens=dict.fromkeys(data.tokens, data.tokens["train"]), sentences=sentences)
    )
    if cell.uneven:
        uncount(trainer.feed.batches)
    weights = canonical_weights(trainer.model, optimizer=trainer.optimizer)
    before = trainer.evaluator.held_out() if mesh.world.size == 1 else None
    record, gradients = step_with_gradients(trainer)
    records = [record]
    sent(mesh)
    records.append(trainer.step())  # not the first: that one makes subgroups and the optimizer's state
    step, calls = sent(mesh)
    records += [trainer.step() for _ in range(steps - 2)]
    check_replicas(trainer.model, mesh, steps)
    sent(mesh)
    after = trainer.evaluator.held_out()
    evaluation, more_calls = sent(mesh)
    buckets, state = trainer.optimizer.buckets, trainer.optimizer.state_bytes()
    found = Measured(
        losses=[record.loss for record in records],
        norms=[record.grad_norm for record in records],
        before=before,
        after=after,
        place=(mesh.pp.rank, mesh.replicas.rank, mesh.tp.rank),
        step=step,
        evaluation=evaluation,
        calls=calls + more_calls,
        state={
            "parameters": sum(bucket.values.nbytes for bucket in buckets),
            "gradients": sum(bucket.gradients.nbytes for bucket in buckets),
            "optimizer": state["state"] + state["masters"],
            "padding": state["padding"],
            "elements": sum(p.numel() for p in trainer.model.parameters()),
        },
    )
    if mesh.stage.rank == 0:
        found.weights, found.gradients = (
            {name: tensor.cpu() for name, tensor in tensors.items()} for tensors in (weights, gradients)
        )
    return found


def sent(mesh: Mesh) -> tuple[Sent, Sent]:
    """Bytes and calls since the last call."""
    amounts, calls = Sent(), Sent()
    for group in mesh.groups:
        for axis, meter in group.meters.items():
            for kind, amount in meter.bytes.items():
                amounts[axis, kind] += amount
                calls[axis, kind] += meter.calls[kind]
            meter.reset()
    return amounts, calls


def check_sent(found: Sent, wanted: Mapping[tuple[str, str], float], calls: Sent, what: str) -> None:
    assert set(found) == set(wanted), f"{what}: other collectives than cost has"
    for key, amount in wanted.items():
        # The meter rounds each call down to a whole byte.
        off = amount - found[key]
        assert 0 <= off <= calls[key], f"{what}: {found[key]:,} bytes were sent by {key}, cost has {amount:,}"
