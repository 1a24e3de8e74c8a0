"""Placements: the one record of how the model is cut, which says what part of the model a local parameter is.

A parameter carries a `Placement`, made where the parameter is made: a tuple of pieces. A piece says which canonical
tensor (its name and shape in the Hugging Face model), which box of it this rank holds, where that box sits in the
local tensor, which ranks hold the same box, and whether their gradients are still to be summed. Initialisation,
gradient reduction, gradient norm, drift checks, memory accounting and export ask this record and nothing else.

A fused QKV weight is three pieces; a vocabulary-padded embedding is a box shorter than its local tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shardwise.base.tensor_box import Box
from shardwise.distributed.collectives import broadcast_object
from shardwise.distributed.mesh import ExpertRanks, Group
from shardwise.distributed.random_bits import hashed
from shardwise.distributed.torch_private import has_data

SEEDED_ROWS = 64
"""Rows of a canonical tensor that are drawn from one seed."""


@dataclass(frozen=True)
class Init:
    """The initial values of a parameter's canonical tensor; made by `Init.normal` or `Init.constant`.

    Attributes:
        kind: `normal` or `constant`.
        std: standard deviation of a normal tensor.
        value: every element of a constant tensor.
    """

    kind: Literal["normal", "constant"]
    std: float = 0.0
    value: float = 0.0

    @staticmethod
    def normal(std: float) -> Init:
        """Normal with mean 0 and standard deviation `std`."""
        return Init("normal", std=std)

    @staticmethod
    def constant(value: float) -> Init:
        """Every element is `value`."""
        return Init("constant", value=value)


@dataclass(frozen=True)
class Outputs:
    """The outputs (rows) of a placed canonical tensor that are linear maps, which may hold others too.

    Attributes:
        start: number of the first of them.
        count: number of them.
        head_dim: consecutive outputs that are an attention head; None: they form no heads.
        maps: number of maps whose heads take turns, such as 3 where each head has its query, key and value.
    """

    start: int
    count: int
    head_dim: int | None = None
    maps: int = 1

    def matrices(self, *, by_head: bool) -> list[list[range]]:
        """Return the outputs of each map as runs, in order; those of each head with `by_head`, if there are heads."""
        stop = self.start + self.count
        if self.head_dim is None or (self.maps == 1 and not by_head):
            return [[range(self.start, stop)]]
        heads = [range(first, first + self.head_dim) for first in range(self.start, stop, self.head_dim)]
        return [[head] for head in heads] if by_head else [heads[number :: self.maps] for number in range(self.maps)]


@dataclass(frozen=True)
class Piece:
    """The part of a local parameter that belongs to one canonical tensor; made by `rows`, `columns` or `replicated`.

    Attributes:
        name: canonical name; an empty prefix (`.weight`) is completed with the module's path by `placements`.
        shape: canonical shape.
        box: part of the canonical tensor that this rank holds.
        local: place of that box in the local tensor (same number of elements, same order).
        init: rule by which the canonical tensor is drawn.
        copies: ranks that hold this same box (a group of one where nobody else does).
        partial: True if each of those ranks has only a part of the gradient: their sum is the gradient.
        transposed: True if the local tensor holds the box with its two dimensions exchanged (GPT-2's `Conv1D` is
            `[in, out]`).
        outputs: outputs of a linear layer that the whole box is a part of; None: all of the canonical tensor.
        experts: the ranks over which the experts are divided of which it is a part; None: it is a part of none.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local: Box
    init: Init
    copies: Group = field(default_factory=Group)
    partial: bool = False
    transposed: bool = False
    outputs: Outputs | None = None
    experts: ExpertRanks | None = None

    @property
    def replicas(self) -> Group | None:
        """The data-parallel ranks that hold the same box; None: all of them."""
        return None if self.experts is None else self.experts.replicas

    @classmethod
    def rows(
        cls,
        name: str,
        shape: tuple[int, ...],
        group: Group,
        init: Init,
        *,
        at: int = 0,
        copies: int = 1,
        per_rank: int | None = None,
    ) -> Piece:
        """The piece of a canonical tensor that is cut along dim 0, at row `at` of the local tensor.

        The g ranks form g / `copies` runs of neighbours; each run's members hold the same `ceil(rows · copies / g)`
        rows, or `per_rank` of them where that is more. The last runs may hold fewer, down to none: the local tensor is
        padded there. The gradient of a box with copies is partial.

        Args:
            name: canonical name; one that begins with a dot (`.weight`) is completed with the module's path.
            shape: `[rows, …]`, canonical.
            group: the ranks over which it is cut.
            init: rule by which the canonical tensor is drawn.
            at: row of the local tensor at which the piece begins.
            copies: neighbouring ranks that hold the same rows, such as those of one K/V head.
            per_rank: rows of each run; None takes the fewest that hold all.
        """
        parts = group.size // copies
        per_rank = per_rank or -(-shape[0] // parts)
        start = min(group.rank // copies * per_rank, shape[0])
        rows = min(per_rank, shape[0] - start)
        row_shape = shape[1:]
        row_start = (0,) * len(row_shape)
        return cls(
            name,
            shape,
            Box((start, *row_start), (rows, *row_shape)),
            Box((at, *row_start), (rows, *row_shape)),
            init,
            group.split(copies) if copies > 1 else Group(),
            partial=copies > 1,
        )

    @classmethod
    def columns(cls, name: str, shape: tuple[int, int], group: Group, init: Init) -> Piece:
        """The piece of a canonical matrix that is cut along dim 1 into equal parts, one for each rank.

        Args:
            name, group, init: as in `rows`.
            shape: `[rows, columns]`, canonical.

        Raises:
            ValueError: the columns are not divisible by the group's size.
        """
        if shape[1] % group.size:
            raise ValueError(f"columns of {name} ({shape[1]}) must be divisible by the group's size ({group.size})")
        width = shape[1] // group.size
        return cls(name, shape, Box((0, group.rank * width), (shape[0], width)), Box.whole((shape[0], width)), init)

    @classmethod
    def replicated(cls, name: str, shape: tuple[int, ...], group: Group, init: Init, *, partial: bool) -> Piece:
        """The piece of a canonical tensor that every rank of the group holds whole.

        Args:
            name, group, init: as in `rows`.
            shape: canonical, and of the local tensor.
            partial: whether the backward pass of each rank gives only a part of the gradient, because the parameter
                meets only a part of the activations there: a part of the sequence, of the heads or of the width.
        """
        box = Box.whole(shape)
        return cls(name, shape, box, box, init, group, partial and group.size > 1)

    def of(self, local: Tensor) -> Tensor:
        """This piece of the tensor `local` as a writable view `[*box.size]`, oriented as the canonical tensor is."""
        view = local[self.local.slices]
        return view.t() if self.transposed else view

    def canonical(self, box: Box) -> Box:
        """`box` of the local tensor, inside this piece, as a box of the canonical tensor."""
        inside = box.relative_to(self.local)
        if self.transposed:
            inside = inside.permuted((1, 0))
        return Box(tuple(a + b for a, b in zip(inside.start, self.box.start, strict=True)), inside.size)

    def transpose(self) -> Piece:
        """The same part of the same local tensor, for a canonical matrix with its two dimensions exchanged."""
        return replace(self, shape=self.shape[::-1], box=self.box.permuted((1, 0)), transposed=not self.transposed)

    def within(self, rows: int, at: int) -> Piece:
        """The same part, for a canonical tensor of `rows` rows in which this piece's tensor begins at row `at`.

        Several layers that are one canonical tensor, such as a fused QKV weight, get their rows by it.
        """
        start = (self.box.start[0] + at, *self.box.start[1:])
        outputs = Outputs(at, self.shape[0])
        return replace(self, shape=(rows, *self.shape[1:]), box=Box(start, self.box.size), outputs=outputs)


@dataclass(frozen=True)
class Placement:
    """The pieces of one local parameter, and the group over which its canonical tensors are cut or copied.

    Attributes:
        is_ordered: True if the layer sums its gradient itself, for each micro-batch, in the order of the group's grain.
    """

    pieces: tuple[Piece, ...]
    group: Group = field(default_factory=Group)
    is_ordered: bool = False

    @property
    def numel(self) -> int:
        """Elements that belong to the model: the local tensor without its padding."""
        return sum(piece.box.numel for piece in self.pieces)

    @property
    def holders(self) -> tuple[Group, ...]:
        """The ranks over which its tensors are cut, and those that hold tensors of their kind of other experts."""
        experts = self.pieces[0].experts
        return (self.group,) if experts is None else (self.group, experts.group)

    @property
    def pieces_to_send(self) -> list[Piece]:
        """The pieces without their groups, which cannot be sent to another process."""
        return [replace(piece, copies=Group(), experts=None) for piece in self.pieces]


# ---- the record on a parameter


class PlacedParameter(nn.Parameter):
    """A parameter with its placement, which a copy of the model keeps."""

    placement: Placement
    deferred_seed: int

    def __deepcopy__(self, memo: dict[int, object]) -> PlacedParameter:
        copied = PlacedParameter(self.detach().clone(), self.requires_grad)
        copied.placement = self.placement
        memo[id(self)] = copied
        return copied


def make_parameter(
    shape: tuple[int, ...],
    pieces: tuple[Piece, ...],
    group: Group,
    *,
    seed: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    deferred: bool = False,
) -> nn.Parameter:
    """A local parameter with its placement, drawn as its pieces say; elements that no piece covers are 0.

    Args:
        shape: local shape, such as `[rows / g, columns]`.
        pieces: record of the parameter.
        group: the ranks over which the canonical tensors are cut or copied.
        seed: the run's seed, from which each canonical tensor draws by its name: the same global tensor at any layout.
            None takes a fresh seed from torch's default generator (as `torch.nn` layers do), agreed on by the group.
        device, dtype: device and dtype of the local tensor.
        deferred: True for a parameter without memory, whose values `draw_deferred` gives.
    """
    parameter = PlacedParameter(torch.zeros(shape, device=device, dtype=dtype))
    parameter.placement = placement = Placement(pieces, group)
    if parameter.device.type != "meta" and has_data(parameter):
        # As an object, since the parameter may lie where the group's backend does not communicate.
        if seed is None:
            seed = broadcast_object(int(torch.randint(2**62, (1,), device="cpu")), group)
        if deferred:
            parameter.deferred_seed = seed
            parameter.untyped_storage().resize_(0)
        else:
            initialize_(parameter, placement, seed)
    return parameter


def draw_deferred(parameter: Tensor, out: Tensor) -> bool:
    """Draw the values of a parameter that was made `deferred` into `out`, which is 0; return False for another one."""
    seed = getattr(parameter, "deferred_seed", None)
    record = of(parameter)
    if seed is None or record is None:
        return False
    initialize_(out, record, seed)
    del cast(Any, parameter).deferred_seed
    return True


class PlacedModule(nn.Module):
    """A `torch.nn.Module` whose parameters keep their placements where torch replaces them.

    `to_empty` and `load_state_dict(…, assign=True)` do so. Derive each layer from it that calls `make_parameter`.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PlacedModule:
        with self._keeping_records():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._keeping_records():
            super()._load_from_state_dict(*args, **kwargs)

    @contextmanager
    def _keeping_records(self) -> Iterator[None]:
        before = {name: p.placement for name, p in self._parameters.items() if isinstance(p, PlacedParameter)}
        yield
        for name, record in before.items():
            new = self._parameters[name]
            if new is not None and not isinstance(new, PlacedParameter):
                placed = PlacedParameter(new.detach(), new.requires_grad)
                placed.placement = record
                self._parameters[name] = placed


def of(parameter: Tensor) -> Placement | None:
    """A parameter's placement, or None for one that is whole here and was made by somebody else's code."""
    # By name and not by class: the parameter of a fake tensor is no PlacedParameter.
    record: Placement | None = getattr(parameter, "placement", None)
    return record


def share(parameter: Tensor, ranks: Group) -> None:
    """Change a parameter's placement: other ranks hold the same boxes, each with only a part of their gradients."""
    _change_pieces(parameter, lambda piece: replace(piece, copies=ranks, partial=True))


def _change_pieces(parameter: Tensor, change: Callable[[Piece], Piece], **of_record: Any) -> None:
    record = of(parameter)
    assert record is not None, "it has no record"
    pieces = tuple(map(change, record.pieces))
    cast(PlacedParameter, parameter).placement = replace(record, pieces=pieces, **of_record)


def mark_ordered(parameter: Tensor) -> None:
    """Change a parameter's placement: its gradient is not partial, as the layer sums it in the order of the grain."""
    _change_pieces(parameter, lambda piece: replace(piece, partial=False), is_ordered=True)


def mark_heads(parameter: Tensor, head_dim: int | None, maps: int = 1) -> None:
    """Change a weight's placement: its outputs are attention heads, of `maps` maps that take turns head by head.

    `head_dim` is the number of outputs of a head; None: it is not known, and the outputs count as no heads.
    """

    def marked(piece: Piece) -> Piece:
        outputs = piece.outputs and replace(piece.outputs, head_dim=head_dim, maps=maps)
        return replace(piece, outputs=outputs)

    _change_pieces(parameter, marked)


@dataclass(eq=False)
class FurtherGradient:
    """A gradient of a placed parameter that adds up by itself; the optimizer adds it to the parameter's once a step."""

    grad: Tensor | None = None  # the sum until now; None before the first term
    grad_dtype: torch.dtype | None = None  # dtype of the sum; None: that of the terms

    def add(self, term: Tensor) -> None:
        """Add a term as autograd adds one to `.grad`."""
        if self.grad is None:
            self.grad = term.to(self.grad_dtype or term.dtype)
        else:
            self.grad.add_(term)


def add_further_gradients(parameter: nn.Parameter, count: int) -> None:
    """Give a placed parameter gradients that its layer adds up each by itself; in pairs, they are added once a step."""
    cast(Any, parameter).further_gradients = [FurtherGradient() for _ in range(count)]


def further_gradients(parameter: Tensor) -> list[FurtherGradient]:
    """Return the further gradients of a placed parameter, which `add_further_gradients` gave it."""
    gradients: list[FurtherGradient] = getattr(parameter, "further_gradients", [])
    return gradients


def of_or_whole(parameter: Tensor, name: str = "", tensor: Group | None = None) -> Placement:
    """A parameter's placement; one without, such as those of torch's own modules, is one canonical tensor, whole.

    Args:
        name: canonical name of a parameter without a record.
        tensor: the tensor-parallel ranks of the model. Each of them has a copy of a parameter that no group cuts.
    """
    record = of(parameter)
    if record is None:
        shape = tuple(parameter.shape)
        box = Box.whole(shape)
        record = Placement((Piece(name, shape, box, box, Init.constant(0.0)),))
    if tensor is None or record.group.size > 1:
        return record
    copied = tuple(replace(piece, copies=tensor) if piece.copies.size == 1 else piece for piece in record.pieces)
    return Placement(copied, tensor)


def placements(module: nn.Module, tensor: Group | None = None) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """Each parameter of a model once, with its local name and its placement under full canonical names.

    `tensor`: as in `of_or_whole`.
    """
    for path, parameter in module.named_parameters():
        placement = of_or_whole(parameter, path, tensor)
        prefix = path.rpartition(".")[0]
        full = tuple(replace(p, name=prefix + p.name) if p.name.startswith(".") else p for p in placement.pieces)
        yield path, parameter, replace(placement, pieces=full)


def unplaced_state(module: nn.Module) -> list[str]:
    """Names of a `state_dict` that no placement covers, as they are no parameters, such as persistent buffers."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [name for name in module.state_dict() if name not in parameters]


Pieces = dict[nn.Parameter, tuple[Piece, ...]]
"""The pieces of each parameter, under names that no other tensor of the model has."""


def named_pieces(groups: Iterable[dict[str, Any]], stage: int) -> Pieces:
    """The pieces of the placement of each parameter of `groups`, by names that are full and unique.

    A name that is not full is completed by the parameter's number among those of its name and shape, and by the
    pipeline stage: every layout without a pipeline gives the same.
    """
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    named: Pieces = {}
    for p in chain.from_iterable(options["params"] for options in groups):
        pieces = of_or_whole(p).pieces
        open_names = {(piece.name, piece.shape) for piece in pieces if not piece.name or piece.name.startswith(".")}
        named[p] = tuple(
            replace(piece, name=f"{piece.name} {piece.shape} {seen[piece.name, piece.shape]} of stage {stage}")
            if (piece.name, piece.shape) in open_names
            else piece
            for piece in pieces
        )
        seen.update(open_names)
    return named


# ---- drawing


@torch.no_grad()
def initialize_(parameter: Tensor, placement: Placement, seed: int) -> None:
    """Draw the initial values of a placed parameter: this rank's boxes of each canonical tensor, in place.

    A normal tensor is drawn in runs of 64 rows, each from the seed hash(seed, name, run), on the CPU in float32
    whatever the device: any rank draws just the rows that it holds, and the whole is the same tensor at any layout.
    """
    drawn: dict[tuple[str, float], list[Piece]] = {}
    for piece in placement.pieces:
        if piece.init.kind == "constant":
            piece.of(parameter).fill_(piece.init.value)
        else:
            drawn.setdefault((piece.name, piece.init.std), []).append(piece)
    for (name, std), pieces in drawn.items():
        shape = pieces[0].shape
        # The runs of which a box has rows; none if it has no row.
        boxes = [piece.box for piece in pieces if piece.box.size[0]]
        ranges = [range(box.start[0] // SEEDED_ROWS, -(-box.stop[0] // SEEDED_ROWS)) for box in boxes]
        for run in sorted(set().union(*ranges)):
            top = run * SEEDED_ROWS
            values = torch.empty((min(SEEDED_ROWS, shape[0] - top), *shape[1:]), dtype=torch.float32, device="cpu")
            values.normal_(0.0, std, generator=torch.Generator().manual_seed(hashed(seed, name, run)))
            for piece in pieces:
                first = piece.box.start[0]
                low = max(first, top)
                high = min(piece.box.stop[0], top + len(values))
                if low < high:
                    drawn_part = values[(slice(low - top, high - top), *piece.box.slices[1:])]
                    piece.of(parameter)[low - first : high - first].copy_(drawn_part)
