"""The model that a checkpoint of another program gives, with its progress if that is known; it becomes a checkpoint."""

from __future__ import annotations

import importlib.metadata
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from shardwise import __version__
from shardwise.base.errors import ConfigError
from shardwise.checkpoint.format import writing
from shardwise.checkpoint.format.export_checkpoint import MASTER
from shardwise.checkpoint.format.manifest import IMPORTED, MODEL, Manifest, TensorEntry
from shardwise.checkpoint.format.safetensors import FLOATING
from shardwise.checkpoint.format.stored_tensors import tensor_mismatches
from shardwise.checkpoint.format.verify import count_non_finite, non_finite_text
from shardwise.checkpoint.storage.checkpoint_folders import step_name
from shardwise.checkpoint.storage.chunks import FileEntry
from shardwise.checkpoint.storage.root import Buffer, Root
from shardwise.config import FamilyConfig
from shardwise.config.hugging_face import to_hugging_face
from shardwise.config.hugging_face_names import WITHOUT_GRADIENT
from shardwise.optim.learning_rate import RateAtStep, rate_at


def schedule_keys(
    points: list[dict[str, Any]], lr: float, step: int, next_rate: float, schedule: object
) -> tuple[dict[str, Any], list[str]]:
    """The keys of an imported schedule of rates by `points`, whose next rate must fit; or a sentence on it."""
    curve = [RateAtStep(point["at"], lr * point["factor"], point["shape"]) for point in points]
    if curve and math.isclose(rate_at(curve, step + 1), next_rate, rel_tol=1e-6, abs_tol=1e-12):
        return {"optimizer.schedule": "points", "optimizer.points": points}, []
    return {}, [
        f"the schedule ({schedule}) has no counterpart here: its next rate is {next_rate:g}; set optimizer.schedule "
        "yourself"
    ]


def imported_points(
    first: float, warmup: int, stop: int, end: int, least: float, shape: str, *, lag: int = 1
) -> list[dict[str, Any]]:
    """The curve of an imported model's learning rates as `optimizer.points`, as factors of the peak.

    `shape`: of the way down; `lag`: update s has the rate of s - lag updates.
    """
    curve = {0: (first, "linear"), warmup: (1.0, "linear"), stop: (1.0, "linear")}
    curve |= {end: (least, shape)} if end > stop else {}
    return [{"at": at + lag, "factor": factor, "shape": kind} for at, (factor, kind) in sorted(curve.items())]


@dataclass(frozen=True)
class ImportedProgress:
    """The progress of an imported model's training by another program, and its AdamW's state, not read yet."""

    step: int  # updates done
    # `exp_avg` and `exp_avg_sq` of all weights that train, and `master` of those that have one.
    states: Sequence[writing.StreamedWeight]
    samples: int | None = None  # samples that it was trained on, which are its position in the data; None: not known
    tokens: int | None = None  # tokens that it was trained on; None: not known
    # Updates as the optimizer counts them, of all weights or by canonical name; None: those of `step`.
    updates: int | Mapping[str, int] | None = None
    # Key → value of a configuration that goes on as the other program would.
    keys: Mapping[str, Any] = field(default_factory=dict)
    losses: tuple[float, ...] = ()  # losses of its last steps

    def described(self) -> dict[str, Any]:
        """The entry `optimizer` of a manifest."""
        updates = self.step if self.updates is None else self.updates
        return {
            "name": "adamw",
            "class": "AdamW",
            "steps": max(updates.values()) if isinstance(updates, Mapping) else updates,
            "states": sorted({weight.state for weight in self.states}),
            "numbers": {"step": updates},
        }


@dataclass(frozen=True)
class ImportedModel:
    """A model to import from another program, whose weights have not been read yet."""

    config: FamilyConfig
    weights: Sequence[writing.StreamedWeight]  # all canonical weights, in the model's order
    # Degrees of parallelism of the source; empty where it is not sharded.
    layout: Mapping[str, Any] = field(default_factory=dict)
    small_files: Mapping[str, bytes] = field(default_factory=dict)  # name → content of other files of the model
    tokens: Mapping[str, Any] = field(default_factory=dict)  # ids of special tokens, for `config.json`
    notes: Sequence[str] = ()  # sentences for the user, on settings of the other program that have no counterpart here
    progress: ImportedProgress | None = None  # how far it was trained; None for weights alone

    @property
    def tensors(self) -> list[writing.StreamedWeight]:
        """The weights, and the optimizer's state of them."""
        return [*self.weights, *(() if self.progress is None else self.progress.states)]

    @property
    def parameters(self) -> int:
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def dtype(self) -> str:
        """The dtype that most parameters have, as torch names it."""
        sizes: Counter[str] = Counter()
        for weight in self.weights:
            sizes[FLOATING[weight.dtype]] += math.prod(weight.shape)
        return max(sizes, key=lambda name: sizes[name])


def write_imported_checkpoint(
    opened: ImportedModel, root: Root, max_shard_bytes: int = writing.MAX_SHARD_BYTES
) -> writing.WrittenFolder:
    """Import another program's model: write it as a checkpoint into a folder, complete or not at all.

    It is of step 0 with weights alone, or of the step to which the other program came, with its optimizer's state.
    ConfigError: there is one, a tensor has values that are not finite, or the optimizer's state is not that of the
    model. StoreError: a file cannot be read or written.
    """
    done = opened.progress or ImportedProgress(0, ())
    _require_fitting_states(opened)
    # Values are checked as they are written: to read the weights twice would take twice the time.
    not_finite: Counter[str] = Counter()

    def manifest(entries: Sequence[FileEntry], files: Sequence[writing.PlannedFile]) -> Manifest:
        if not_finite:
            raise ConfigError(f"SOURCE must have finite weights, and it has {non_finite_text(not_finite)}")
        return Manifest(
            step=done.step,
            samples=done.samples or 0,
            position=done.samples or 0,
            tokens=done.tokens or 0,
            config={"model": opened.config.model_dump(mode="json")},
            layout=opened.layout,
            schedule={},
            data={} if opened.progress is None else IMPORTED,
            rng={},
            versions={"shardwise": __version__, "torch": importlib.metadata.version("torch")},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            optimizer=None if opened.progress is None else done.described(),
            losses=done.losses,
            files=tuple(entries),
            tensors=writing.tensor_entries(entries, [file.piece_rows for file in files]),
        )

    tensors = [replace(tensor, read=partial(_read_counting, tensor, not_finite)) for tensor in opened.tensors]
    described = {**to_hugging_face(opened.config), "torch_dtype": opened.dtype, **opened.tokens}
    small_files = {**opened.small_files, writing.CONFIG: writing.to_json(described)}
    return writing.write_folder(
        root, step_name(done.step), tensors, small_files, max_shard_bytes=max_shard_bytes, manifest=manifest
    )


def _require_fitting_states(opened: ImportedModel) -> None:
    shapes = {weight.name: weight.shape for weight in opened.weights if math.prod(weight.shape)}
    states: dict[str, dict[str, TensorEntry]] = {}
    for tensor in opened.tensors[len(opened.weights) :]:
        states.setdefault(tensor.state, {})[tensor.name] = TensorEntry(tensor.shape, tensor.dtype, ())
    problems: list[str] = []
    for state, entries in states.items():
        # Only low-precision weights have a master.
        needed = [name for name in shapes if state != MASTER and not name.endswith(WITHOUT_GRADIENT)]
        problems += tensor_mismatches("SOURCE", shapes, entries, needed=needed, state=state)
    if problems:
        raise ConfigError(problems)


def _read_counting(weight: writing.StreamedWeight, not_finite: Counter[str]) -> Iterator[Buffer]:
    for data in weight.read():
        count = count_non_finite(memoryview(data).cast("B"), weight.dtype)
        if count:
            not_finite[weight.name if weight.state == MODEL else f"{weight.state} of {weight.name}"] += count
        yield data
