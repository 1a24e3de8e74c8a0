"""Column- and row-parallel linear layers (Megatron-LM, arXiv:1909.08053 §3; sequence parallelism: arXiv:2205.05198
§4.2.2).

Shapes per rank, g = group size: S sequence, B batch, I input features, O output features. Activations are
sequence-first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from torch import Tensor, nn

from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Ranks
from shardwise.distributed.placement import Init
from shardwise.layers.arguments import layer_sizes, refuse_unknown, sharing_group
from shardwise.layers.bitwise import choose_class
from shardwise.layers.execution import execution
from shardwise.layers.matmul import Overlap, can_regather, gather_and_multiply, linear, multiply_and_sum, usable

if TYPE_CHECKING:
    from shardwise.layers.fp8 import Scaling

DEFAULT_INIT = Init.normal(0.02)


class LayerOptions(TypedDict, total=False):
    """Keywords that every sharded layer takes beside its own arguments.

    Attributes:
        group: the ranks that share the layer (a `Group` such as `mesh.tp`, a process group, or one axis of a
            `DeviceMesh`). Without it a layer is whole on every rank, and a job of several ranks warns; `Group()` asks
            for a whole layer.
        seed: the run's seed; the weights are then a function of (seed, name) at any layout, and the layer needs a name.
            None draws from torch's generator.
        init: distribution of the weight, such as `Init.normal(0.01)` (default: `Init.normal(0.02)`). Norms begin at
            1 and biases at 0, whatever it is.
        device: device of the local tensors.
        dtype: dtype of the local tensors.
        deferred: true if the local tensors get memory and values later, from the `ZeroRedundancyOptimizer` that takes
            them, so that a rank never holds all of a model that it is to hold a part of.
    """

    group: Ranks | None
    seed: int | None
    init: Init
    device: torch.device | str | None
    dtype: torch.dtype | None
    deferred: bool


class LinearOptions(LayerOptions, total=False):
    """Keywords that every linear layer takes: those of `LayerOptions`, and one more.

    Attributes:
        transposed: true if the canonical weight is `[in, out]`, as that of GPT-2's `Conv1D`; the local one is
            `[out, in]` nevertheless.
    """

    transposed: bool


class ParameterMaker:
    """Makes the parameters of one layer from the layer's keywords.

    Attributes:
        group: the ranks that share the layer.
        init: distribution of the weight.

    Args:
        layer: layer that gets the parameters.
        options: keywords of its call.
        known: names of the keywords that it takes.
        warns: true if a job of several ranks is warned where there is no group.

    Raises:
        ArgumentError: a keyword that the layer does not take.
        ValueError: `init` is no `Init`.
    """

    def __init__(
        self,
        layer: nn.Module,
        options: LayerOptions,
        known: frozenset[str] = LayerOptions.__optional_keys__,
        *,
        warns: bool = True,
    ) -> None:
        refuse_unknown(type(layer), options, known)
        self.init = options.get("init", DEFAULT_INIT)
        if not isinstance(self.init, Init):
            raise ValueError(f"init ({self.init!r}) must be a shardwise.Init, such as shardwise.Init.normal(0.02)")
        self.group = sharing_group(type(layer).__name__, options.get("group"), needed=warns)
        self._seed = options.get("seed")
        self._device = options.get("device")
        self._dtype = options.get("dtype")
        self._deferred = options.get("deferred", False)

    def name(self, layer_name: str | None, leaf: str) -> str:
        """Return the canonical name of a tensor; without a `layer_name` it is completed with the module's path later.

        Raises:
            ValueError: the layer has a seed and no name.
        """
        # The module's path is not known while the module is made, and the values must be.
        if self._seed is not None and layer_name is None:
            raise ValueError("a layer with a seed needs a name: its weights are drawn from (seed, name)")
        return f"{layer_name or ''}.{leaf}"

    def parameter(self, shape: tuple[int, ...], *pieces: placement.Piece) -> nn.Parameter:
        """Make a parameter of this local shape that consists of the pieces."""
        parameter = placement.make_parameter(
            shape,
            pieces,
            self.group,
            seed=self._seed,
            device=self._device,
            dtype=self._dtype,
            deferred=self._deferred,
        )
        if self.group.grain is not None:
            placement.mark_ordered(parameter)
        return parameter


class _ColumnParallel(placement.PlacedModule):
    """One matmul for several linear maps of the same input, each cut along its outputs.

    weight: `[Σ outputs · copies / g, I]`. The parts stand one after the other in the local tensor. Parts of the same
    name are one canonical layer, whose outputs they are in that order.

    Attributes:
        overlap: way in which it communicates during its matmuls (`layers/matmul.py`); None: in turn with them.
        regathers: true if under sequence parallelism it gathers its input again for the backward pass.
        scaling: scales of products in fp8 (`layers/fp8.py`) in training; None: products in the dtype of the weight.
    """

    overlap: Overlap | None = None
    regathers: bool = False
    scaling: Scaling | None = None

    def __init__(
        self,
        input_size: int,
        parts: Sequence[tuple[str | None, int, int]],
        *,
        bias: bool,
        gather_output: bool,
        sequence_parallel_enabled: bool,
        repeats: Sequence[int] = (),
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__()
        maker = ParameterMaker(self, options, LinearOptions.__optional_keys__)
        self.group = group = maker.group
        self.input_size = input_size
        self.gather_output = gather_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        made_with = execution()
        self.overlap = made_with.overlap
        self.regathers = made_with.regathers
        self.scaling = made_with.scaling(group, cuts_outputs=True)
        for _, size, copies in parts:
            if size * copies % group.size:
                raise ValueError(f"output size ({size}) must be divisible by the group's size ({group.size})")
            if group.grain is not None and copies == 1 and size % group.grain and not repeats:
                raise ValueError(f"output size ({size}) must be divisible by the group's grain ({group.grain})")
        # Of each part of the outputs, the neighbours among all holders that have the same.
        self._copies = [copies for _, _, copies in parts]
        self._holders = group.size
        self._repeats = list(repeats) if repeats else [1] * len(parts)
        self._sizes = [size * copies // group.size for _, size, copies in parts]
        transposed = options.get("transposed", False)

        def pieces(leaf: str, columns: tuple[int, ...], init: Init) -> list[placement.Piece]:
            """Return the pieces of the weight, or of the bias, which has no `columns`."""
            pieces = []
            for i, (name, size, copies) in enumerate(parts):
                piece = placement.Piece.rows(
                    maker.name(name, leaf), (size, *columns), group, init, at=sum(self._sizes[:i]), copies=copies
                )
                # Rows of the canonical layer of this name: parts of one name follow each other in it.
                rows = [part[1] if part[0] == name else 0 for part in parts]
                piece = piece.within(sum(rows), sum(rows[:i]))
                if transposed and columns:
                    piece = piece.transpose()
                pieces.append(piece)
            return pieces

        outputs = sum(self._sizes)
        self.weight = maker.parameter((outputs, input_size), *pieces("weight", (input_size,), maker.init))
        self.bias = maker.parameter((outputs,), *pieces("bias", (), Init.constant(0.0))) if bias else None
        choose_class(self)

    def multiply(self, entered: Tensor) -> tuple[Tensor, ...]:
        """`entered` `[…, I]`, whole on every rank of the group → each part `[…, local outputs]`. No communication."""
        return tuple(_product(self, entered, self.bias).split(self._sizes, dim=-1))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x `[S/g, B, I]` with sequence parallelism, else `[S, B, I]` → each part `[S, B, local outputs]`."""
        return tuple(self.joined(x).split(self._sizes, dim=-1))

    def joined(self, x: Tensor) -> Tensor:
        """x, as in `project` → all parts side by side, `[S, B, Σ local outputs]`."""
        if self.overlap is not None or self.regathers:
            overlap = usable(self.overlap, x, self.group)
            regathers = self._regathers(x)
            if regathers or overlap is not None:
                is_cut = self.sequence_parallel_enabled
                arguments = (x, self.weight, self.bias, self.group, overlap)
                return gather_and_multiply(*arguments, sequence_parallel=is_cut, regathers=regathers)
        entered = collectives.gather_or_copy(x, self.group, sequence_parallel=self.sequence_parallel_enabled)
        return _product(self, entered, self.bias)

    def _regathers(self, x: Tensor) -> bool:
        return self.regathers and self.sequence_parallel_enabled and can_regather(x, self.group)

    def _gathered(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self._gather(part, copies) for part, copies in zip(parts, self._copies, strict=True))

    def _gather(self, part: Tensor, copies: int) -> Tensor:
        """Return a part of all ranks, each copy once."""
        gathered = collectives.gather_last(part, self.group)
        if copies == 1:
            return gathered
        # Neighbours hold the copies: of each run of them, the first one's stays.
        by_copy = gathered.unflatten(-1, (self._holders // copies, copies, -1))
        first_copies: Tensor = by_copy[..., 0, :].flatten(-2)
        return first_copies

    def extra_repr(self) -> str:
        return f"{self.input_size} -> {self._sizes} of {self.group}, sequence_parallel={self.sequence_parallel_enabled}"


class ColumnParallelLinear(_ColumnParallel):
    """`Y = X Aᵀ + b` with A cut along its outputs: rank r holds `A[r·O/g : (r+1)·O/g]`.

    Forward: x `[S, B, I]`, or `[S/g, B, I]` with `sequence_parallel_enabled`; returns `[S, B, O/g]`, or `[S, B, O]`
    with `gather_output`. Communicates: with sequence parallelism an all-gather of x (its gradient: a reduce-scatter);
    without, nothing (its gradient: an all-reduce); `gather_output` adds an all-gather of y (arXiv:1909.08053 §3,
    arXiv:2205.05198 §4.2).

    Args:
        input_size: I of the whole layer.
        output_size: O of the whole layer.
        bias: true if there is a b.
        gather_output: true if each rank gets all of y.
        sequence_parallel_enabled: true if the sequence is cut over the group between layers.
        name: canonical name of the layer, without `.weight`.
        options: see `LayerOptions` and `LinearOptions`.

    Raises:
        ValueError: `output_size` is not divisible by the group's size.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        *,
        sequence_parallel_enabled: bool = False,
        name: str | None = None,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(
            input_size,
            [(name, output_size, 1)],
            bias=bias,
            gather_output=gather_output,
            sequence_parallel_enabled=sequence_parallel_enabled,
            **options,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.project(x))

    def finish(self, local: tuple[Tensor, ...]) -> Tensor:
        """`local`, one part `[…, O/g]` → the layer's output, which is the same, or whole with `gather_output`."""
        return (self._gathered(local) if self.gather_output else local)[0]


class MergedColumnParallelLinear(_ColumnParallel):
    """Several column-parallel layers of one input in one matmul, such as a gated MLP's gate and up projections.

    Forward: x `[S, B, I]`, or `[S/g, B, I]` with `sequence_parallel_enabled`; returns one tensor a part, each as
    `ColumnParallelLinear` would (arXiv:1909.08053 §3).

    Args:
        input_size, bias, gather_output, sequence_parallel_enabled, options: as in `ColumnParallelLinear`.
        output_sizes: O of each part.
        names: canonical name of each part; parts of one name are one canonical layer.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        *,
        names: Sequence[str],
        sequence_parallel_enabled: bool = False,
        **options: Unpack[LinearOptions],
    ) -> None:
        if len(names) != len(output_sizes):
            raise ValueError(f"names ({len(names)}) must be as many as output_sizes ({len(output_sizes)})")
        super().__init__(
            input_size,
            [(name, size, 1) for name, size in zip(names, output_sizes, strict=True)],
            bias=bias,
            gather_output=gather_output,
            sequence_parallel_enabled=sequence_parallel_enabled,
            **options,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x, as in `ColumnParallelLinear` → the output of each part, `[S, B, O/g]` or whole."""
        parts = self.project(x)
        return self._gathered(parts) if self.gather_output else parts


class GQAQKVColumnParallelLinear(_ColumnParallel):
    """Query, key and value projections in one matmul, for grouped-query attention (arXiv:2305.13245).

    Where the group is larger than the number of K/V heads, each K/V head is held by g / heads neighbouring ranks: their
    gradients are partial, which the weight's placement says.

    Forward: x as in `ColumnParallelLinear`; returns q `[S, B, Q/g]`, k and v `[S, B, max(KV/g, head_dim)]`, or all
    whole with `gather_output`.

    Args:
        input_size, bias, gather_output, sequence_parallel_enabled, options: as in `ColumnParallelLinear`.
        output_sizes: features of the queries, and features of the keys, which the values have too, in the whole model.
        head_dim: features of a head. Without it, the keys are cut into parts of KV · `kv_size_multiplier` / g features,
            wherever a head begins: give it, or the multiplier, where the ranks outnumber the K/V heads.
        kv_size_multiplier: ranks that hold the same part of the keys, for calls without `head_dim`, as
            neuronx-distributed has them.
        names: canonical names of the three layers; the same three times, or none, if they are one, with the rows of q,
            then k, then v.

    Raises:
        ValueError: a size is no multiple of `head_dim`; the query heads are not divisible by the group's size; K/V
            heads and the group's size do not divide each other; `head_dim` does not follow, or contradicts
            `kv_size_multiplier`.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        *,
        head_dim: int | None = None,
        kv_size_multiplier: int = 1,
        names: Sequence[str | None] = (None, None, None),
        sequence_parallel_enabled: bool = False,
        **options: Unpack[LinearOptions],
    ) -> None:
        # Sizes are checked before the base class sees the keywords: a wrong keyword is the first to be reported.
        refuse_unknown(type(self), options, LinearOptions.__optional_keys__)
        group = sharing_group(type(self).__name__, options.get("group"))
        size = group.size
        problem = f"output_sizes ({output_sizes!r}) must be two numbers above 0: features of queries and of keys"
        q_size, kv_size = layer_sizes(output_sizes, 2, problem)
        given_dim = head_dim
        head_dim = _features_per_head(kv_size, kv_size_multiplier, size) if given_dim is None else given_dim
        for kind, features in (("query", q_size), ("key/value", kv_size)):
            if features < head_dim or features % head_dim:
                raise ValueError(f"{kind} size ({features}) must be a multiple of head_dim ({head_dim})")
        q_heads = q_size // head_dim
        kv_heads = kv_size // head_dim
        if q_heads % size:
            raise ValueError(f"query heads ({q_heads}) must be divisible by the group's size ({size})")
        if kv_heads % size and size % kv_heads:
            raise ValueError(f"K/V heads ({kv_heads}) must divide the group's size ({size}) or be divisible by it")
        # Ranks that hold the same K/V head: its keys are needed on each rank that has one of its query heads.
        copies = max(size // kv_heads, 1)
        if kv_size_multiplier not in (1, copies):
            raise ValueError(
                f"kv_size_multiplier ({kv_size_multiplier}) must be {copies}, the ranks that hold each of {kv_heads} "
                f"K/V heads of head_dim ({head_dim}) in a group of {size}: leave it out"
            )
        repeats = 1
        if group.grain is not None:
            if q_heads % group.grain or (kv_heads % group.grain and group.grain % kv_heads):
                raise ValueError(
                    f"the group's grain ({group.grain}) must divide the query heads ({q_heads}), and divide or be a "
                    f"multiple of the K/V heads ({kv_heads})"
                )
            # Each part has a K/V head of its own, as each of `grain` ranks would.
            repeats = max(group.grain // kv_heads, 1) // copies
        if len(names) != 3:
            raise ValueError(f"names ({len(names)}) must be 3: those of the query, the key and the value layer")
        # Of equal names, the rows of q, then of k, then of v are one canonical layer.
        q_name, k_name, v_name = names
        super().__init__(
            input_size,
            [(q_name, q_size, 1), (k_name, kv_size, copies), (v_name, kv_size, copies)],
            bias=bias,
            gather_output=gather_output,
            sequence_parallel_enabled=sequence_parallel_enabled,
            repeats=(1, repeats, repeats),
            **options,
        )
        placement.mark_heads(self.weight, given_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.project(x)
        q, k, v = self._gathered(parts) if self.gather_output else parts
        return q, k, v


class RowParallelLinear(placement.PlacedModule):
    """`Y = Σ_r X_r A_rᵀ + b` with A cut along its inputs: rank r holds `A[:, r·I/g : (r+1)·I/g]`.

    Forward: x `[S, B, I/g]` with `input_is_parallel`, else `[S, B, I]` which is split here; returns `[S, B, O]`, or
    `[S/g, B, O]` with `sequence_parallel_enabled`. Communicates: an all-reduce of y, or with sequence parallelism a
    reduce-scatter (its gradient: an all-gather). The bias is whole on every rank and added once, after the sum; with
    sequence parallelism each rank sees part of the sequence, so its gradient is partial, which its placement says
    (arXiv:1909.08053 §3, arXiv:2205.05198 §4.2).

    Args:
        input_size, output_size, bias, sequence_parallel_enabled, name, options: as in `ColumnParallelLinear`.
        input_is_parallel: true if x is already cut along I, as a column-parallel layer leaves it.

    Attributes:
        overlap, scaling: as in the column-parallel layers.

    Raises:
        ValueError: `input_size` is not divisible by the group's size; sequence parallelism without `input_is_parallel`.
    """

    overlap: Overlap | None = None
    scaling: Scaling | None = None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        *,
        sequence_parallel_enabled: bool = False,
        name: str | None = None,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__()
        maker = ParameterMaker(self, options, LinearOptions.__optional_keys__)
        self.group = group = maker.group
        if input_size % group.size:
            raise ValueError(f"input size ({input_size}) must be divisible by the group's size ({group.size})")
        if group.grain is not None and input_size % group.grain:
            raise ValueError(f"input size ({input_size}) must be divisible by the group's grain ({group.grain})")
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError("sequence_parallel_enabled (True) must go with input_is_parallel (True)")
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel_enabled = sequence_parallel_enabled
        made_with = execution()
        self.overlap = made_with.overlap
        self.scaling = made_with.scaling(group, cuts_outputs=False)
        piece = placement.Piece.columns(maker.name(name, "weight"), (output_size, input_size), group, maker.init)
        if options.get("transposed", False):
            piece = piece.transpose()
        self.weight = maker.parameter((output_size, input_size // group.size), piece)
        self.bias = None
        if bias:
            piece = placement.Piece.replicated(
                maker.name(name, "bias"), (output_size,), group, Init.constant(0.0), partial=sequence_parallel_enabled
            )
            self.bias = maker.parameter((output_size,), piece)
        choose_class(self)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = collectives.split_last(x, self.group)
        return row_parallel_sum((self, x))

    def _products(self, terms: Sequence[tuple[RowParallelLinear, Tensor]]) -> Tensor:
        """Return this rank's term of the sum of several layers' outputs, of which this is the first."""
        total = _product(self, terms[0][1])
        for layer, x in terms[1:]:
            total = total + _product(layer, x)
        return total

    def _add_bias(self, y: Tensor, bias: Tensor) -> Tensor:
        return y + bias

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape)
        return f"weight={shape} of {self.group}, sequence_parallel={self.sequence_parallel_enabled}"


def row_parallel_sum(*terms: tuple[RowParallelLinear, Tensor]) -> Tensor:
    """Return the sum of the outputs of several row-parallel layers of one group, with one collective.

    Args:
        terms: layers, each with its input, which is cut already: `[S, B, I/g]`.
    """
    # The sum is linear: products of all layers are added on each rank first, and the ranks sum only once.
    first, x = terms[0]
    sequence_parallel = first.sequence_parallel_enabled
    overlap = first.overlap and usable(first.overlap, x, first.group)
    if overlap is not None:
        products = [(x, layer.weight) for layer, x in terms]
        y = multiply_and_sum(products, first.group, overlap, sequence_parallel=sequence_parallel)
    else:
        y = collectives.scatter_or_reduce(first._products(terms), first.group, sequence_parallel=sequence_parallel)
    # Biases are added after the sum: before it, each rank would add them.
    for layer, _ in terms:
        if layer.bias is not None:
            y = layer._add_bias(y, layer.bias)
    return y


def _product(layer: _ColumnParallel | RowParallelLinear, x: Tensor, bias: Tensor | None = None) -> Tensor:
    if layer.scaling is not None and layer.training:
        return layer.scaling.linear(x, layer.weight, bias)
    return linear(x, layer.weight, bias)


def scaling_in_training(layer: _ColumnParallel | RowParallelLinear) -> Scaling | None:
    """Return the scales of a layer that is trained. One that is evaluated has no scales, which depend on the batch."""
    return layer.scaling if layer.training else None


def linear_layers(model: nn.Module) -> list[_ColumnParallel | RowParallelLinear]:
    """Return all column- and row-parallel layers of a model."""
    return [module for module in model.modules() if isinstance(module, _ColumnParallel | RowParallelLinear)]


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of all column- and row-parallel layers of a model."""
    return [layer.weight for layer in linear_layers(model)]


class ReplicatedLinear(placement.PlacedModule):
    """`Y = X Aᵀ + b`, whole on every rank, for small layers that all ranks compute alike. No communication.

    x `[…, I]`, equal on every rank with a gradient that is equal too → `[…, O]`. `input_size` and `output_size` are I
    and O; `name` and `options` are as in the other layers, see `LayerOptions`. The math is that of `torch.nn.Linear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self, input_size: int, output_size: int, *, name: str | None = None, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__()
        # The layer is whole on every rank with and without a group, so nobody is warned that a group is missing.
        maker = ParameterMaker(self, options, warns=False)
        for leaf, shape, init in (
            ("weight", (output_size, input_size), maker.init),
            ("bias", (output_size,), Init.constant(0.0)),
        ):
            piece = placement.Piece.replicated(maker.name(name, leaf), shape, maker.group, init, partial=False)
            self.register_parameter(leaf, maker.parameter(shape, piece))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def _features_per_head(kv_size: int, multiplier: object, ranks: int) -> int:
    """The features of a rank's part of the keys, each of which `multiplier` ranks have; ValueError if none fits."""
    if not isinstance(multiplier, int) or multiplier < 1 or ranks % multiplier or kv_size * multiplier % ranks:
        raise ValueError(
            f"kv_size_multiplier ({multiplier}) must divide the group's size ({ranks}), and the key/value size "
            f"({kv_size}) must be divisible by their quotient: give head_dim=, the features of a head, instead"
        )
    return kv_size * multiplier // ranks
