"""Sizes of a block on one rank, from which its time follows.

Legend: see `estimates/rank_workload.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.config import DTYPE_BYTES, Config, DtypeName, FamilyConfig, Layout, Matmul, Recompute
from shardwise.config.routing import Routing
from shardwise.models.parameter_counts import LocalWidths
from shardwise_plan.device_seconds import LinkedRanks, linked_ranks
from shardwise_plan.device_specs import Cluster, Device
from shardwise_plan.program_traits import ProgramTraits

_ROUTING_KERNELS = 20  # scores, the choice, the order of rows, and their sum, beside those of an MLP


class _Weight(NamedTuple):
    """Equal weights `[outputs, inputs]`, so many of them, and the rows that each is multiplied with."""

    outputs: int
    inputs: int
    rows: int
    number: int = 1


class _RowExchange(NamedTuple):
    """The work of a pass that brings each token to the experts that its router chooses; a dense block has none.

    `scores`: the weight of the router's product, which is in float32 on the tokens between the cut layers.
    """

    scores: _Weight = _Weight(0, 0, 0)
    moved_bytes: int = 0  # bytes that are read and written to put rows in the order of their experts, and to sum them
    sent_bytes: float = 0.0  # bytes of all rows that a rank sends to the ranks of `group`; as many come back
    group: LinkedRanks = LinkedRanks(1, 1)  # ranks that divide the experts among them
    kernels: int = 0


@dataclass(frozen=True)
class BlockShape:
    """Sizes on which the predicted time of a block depends, for one micro-batch on one rank."""

    model: FamilyConfig
    local: LocalWidths  # widths of one rank's part
    batch: int  # B
    length: int  # S
    tensor_group: LinkedRanks  # the t ranks that share each token
    sequence_parallel: bool  # True if activations are cut along the sequence too
    dtype: DtypeName  # dtype of parameters and activations
    gradient: DtypeName
    recompute: Recompute
    regathers: bool  # True if inputs that sequence parallelism gathered are gathered again in the backward pass
    matmul: Matmul | None  # format of the products of weights, if it is not `dtype`
    context_group: LinkedRanks  # the c ranks that share each sample
    passes_keys: bool  # True if keys and values of other ranks come one rank after the other while attention computes
    expert_group: LinkedRanks  # ranks that divide the experts
    routing: Routing | None = None  # rule of the block's router; None: it has an MLP

    @staticmethod
    def of(config: Config, layout: Layout, cluster: Cluster, program: ProgramTraits) -> BlockShape:
        """Return the sizes of a block with an MLP."""
        model = config.known_shapes
        precision = config.precision.resolved(cluster.device.is_accelerator)
        is_left_to_compiler = config.compile.enabled and program.fused_attention
        return BlockShape(
            model=model,
            local=LocalWidths.on(layout, model, config.vocab_multiple(layout.tensor)),
            batch=config.train.micro_batch,
            length=config.train.sequence_length,
            tensor_group=linked_ranks(layout.tensor, 1, cluster.per_node),
            sequence_parallel=layout.sequence_parallel,
            dtype=precision.parameter,
            gradient=precision.gradient,
            recompute="none" if is_left_to_compiler and config.recompute == "selective" else config.recompute,
            regathers=config.regathers,
            matmul=config.precision.matmul,
            context_group=linked_ranks(layout.context, layout.tensor, cluster.per_node),
            passes_keys=config.passes_keys,
            expert_group=linked_ranks(layout.expert, layout.tensor, cluster.per_node),
        )

    @property
    def tensor(self) -> int:
        return self.tensor_group.ranks

    @property
    def tokens(self) -> int:
        return self.batch * self.queries

    @property
    def queries(self) -> int:
        """S/c: tokens of a sample that the rank has."""
        return self.length // self.context_group.ranks

    @property
    def weights(self) -> tuple[_Weight, ...]:
        """Those of QKV, of the output projection, and of the MLP's first and last layers, or of a rank's experts'.

        Loads are balanced. A shared expert comes last.
        """
        hidden = self.model.hidden_size
        tokens = self.tokens
        matrices = 2 if self.model.gated else 1
        attention = (
            _Weight(self.local.query + 2 * self.local.key_value, hidden, tokens),
            _Weight(hidden, self.local.query, tokens),
        )
        if self.routing is None:
            width = self.local.intermediate
            return (*attention, _Weight(width * matrices, hidden, tokens), _Weight(hidden, width, tokens))
        width = self.model.expert_width // self.tensor
        local_experts = self.routing.experts // self.expert_group.ranks
        rows = -(-self.rows // local_experts)
        experts = (_Weight(width * matrices, hidden, rows, local_experts), _Weight(hidden, width, rows, local_experts))
        width = self.model.shared_expert_width // self.tensor
        shared = (_Weight(width * matrices, hidden, tokens), _Weight(hidden, width, tokens)) if width else ()
        return (*attention, *experts, *shared)

    @property
    def rows(self) -> int:
        """T·k: rows of a rank's experts, of balanced loads."""
        return 0 if self.routing is None else self.tokens * self.routing.per_token

    def exchange(self, program: ProgramTraits) -> _RowExchange:
        """Return the work that the block's router adds to a pass."""
        if self.routing is None:
            return _RowExchange()
        hidden = self.model.hidden_size
        ranks = self.expert_group.ranks
        # Where ranks divide the experts, rows are put in the order of these once more.
        moves = 2 + 2 * (ranks > 1)
        visits = self.routing.visits(ranks) if program.travels_once else self.routing.per_token
        return _RowExchange(
            _Weight(self.routing.experts, hidden, self.x_elements // hidden),
            moves * self.a * (self.rows + self.tokens) * hidden,
            self.a * self.tokens * visits * hidden,
            self.expert_group,
            _ROUTING_KERNELS,
        )

    @property
    def feed_elements(self) -> int:
        """Elements of the MLP's inner tensor, or of those of experts."""
        return sum(weight.inputs * weight.rows * weight.number for weight in self.weights[3::2])

    @property
    def bias_elements(self) -> int:
        """Elements of the outputs to which biases are added."""
        query_key_value, attention_output, up, down = (self.tokens * weight.outputs for weight in self.weights[:4])
        attention = query_key_value + attention_output * self.model.attention_output_bias
        return attention * self.model.attention_bias + (up + down) * self.model.mlp_bias

    @property
    def has_dropout(self) -> bool:
        """True if what attention and MLP add to x is dropped in part."""
        return self.model.hidden_dropout_p > 0

    @property
    def a(self) -> int:
        """Bytes of an element of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def x_elements(self) -> int:
        """T/s·H: elements of x between the cut layers."""
        return self.tokens * self.model.hidden_size // (self.tensor if self.sequence_parallel else 1)

    @property
    def gathered_bytes(self) -> int:
        """a·T·H: bytes of x after it is gathered over sequence parallelism."""
        return self.a * self.tokens * self.model.hidden_size

    def accumulation_bytes(
        self, elements: int, device: Device, program: ProgramTraits, in_products: bool = False
    ) -> float:
        """Return the bytes that are read and written to add a weight's new gradient to that of earlier micro-batches.

        The new gradient and the sum are read, and the sum is written. With another dtype, a program that casts also
        writes and reads a copy of the new gradient, as a CPU's addition does. `in_products`: the new gradient stays in
        the product's kernel. A program that flattens gradients copies, casts and divides the new one.
        """
        g = DTYPE_BYTES[self.gradient]
        if program.flattens_gradients:
            copy = self.a + g if self.gradient != self.dtype else 0
            return elements * (2.0 * self.a + copy + 2.0 * g)
        if in_products:
            return 2.0 * g * elements
        if self.gradient == self.dtype:
            return 3.0 * g * elements
        cast = 2 * g if program.casts_gradients or not device.is_accelerator else 0
        return elements * (self.a + 2.0 * g + cast)
