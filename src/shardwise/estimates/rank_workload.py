"""One configuration on one layout, as the formulas of `estimates/` and `shardwise_plan` read it.

Legend:

    S  sequence length           H   hidden size                        t  tensor-parallel degree
    B  micro-batch               F   intermediate size (MLP)            s  t under sequence parallelism, else 1
    c  context-parallel degree   V   vocabulary                         d  data-parallel degree
    T  tokens, S·B/c             L   blocks                             p  pipeline degree
    P  predicted positions of    h   query heads                        m  micro-batches of a step on each rank
       a sequence (BERT)         q   h · head_dim                       a  bytes of an element of an activation,
    x  the residual stream,      kv  key/value heads · head_dim            which has the parameters' dtype
       [T/s, H] on a rank
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import cached_property

from shardwise.config import DTYPE_BYTES, Config, FamilyConfig, Layout, Precision, Recompute
from shardwise.config.layout import LayoutStage
from shardwise.models.parameter_counts import LONG, LocalWidths
from shardwise.pipeline.partition import stage_plan

_FP8 = 1


@dataclass(frozen=True, eq=False)
class RankWorkload:
    """The inputs of the estimates, for one pipeline rank. It is equal to itself alone, as a key of caches."""

    config: Config
    layout: Layout
    model: FamilyConfig  # configuration of a family whose shapes are known
    precision: Precision  # dtypes, resolved
    local: LocalWidths
    accelerator: bool  # True if the run is on an accelerator
    pipeline_rank: int
    stages: tuple[LayoutStage, ...]  # stages of that rank; without a pipeline a single one, which is the model
    imbalance: float = 1.0  # rows that routers send to this rank over those of balanced loads

    @staticmethod
    def of(config: Config, layout: Layout, accelerator: bool, pipeline_rank: int = 0) -> RankWorkload | None:
        """The workload of one pipeline rank; None for a model of your own, whose shapes are not known."""
        workloads = RankWorkload.of_ranks(config, layout, accelerator)
        return workloads[pipeline_rank] if workloads else None

    @staticmethod
    def of_ranks(
        config: Config, layout: Layout, accelerator: bool, only: Collection[int] | None = None
    ) -> list[RankWorkload]:
        """The workloads of all pipeline ranks, or of those in `only`; empty for a model of your own."""
        model = config.shapes
        if model is None:
            return []
        local = LocalWidths.on(layout, model, config.vocab_multiple(layout.tensor))
        precision = config.precision.resolved(accelerator)
        plan = stage_plan(config, layout)
        return [
            RankWorkload(
                config,
                layout,
                model,
                precision,
                local,
                accelerator,
                pipeline_rank=rank,
                stages=tuple(stage for stage in plan if stage.rank == rank),
            )
            for rank in sorted(set(range(layout.pipeline) if only is None else only))
        ]

    @property
    def layers(self) -> int:
        """Blocks on this rank: L / p if every rank has equally many."""
        return sum(len(stage.layers) for stage in self.stages)

    @cached_property
    def first_alike(self) -> dict[int, int]:
        """For each block of this rank, the first one of its kind."""
        first: dict[Hashable, int] = {}
        layers = (layer for stage in self.stages for layer in stage.layers)
        return {layer: first.setdefault(self.model.kind_of_block(layer), layer) for layer in layers}

    @property
    def is_bit_equal(self) -> bool:
        """True if the order of sums is the same at all layouts."""
        return self.config.is_bit_equal

    @property
    def has_parts(self) -> bool:
        """True if linear layers multiply by parts."""
        return self.is_bit_equal and self.config.parallel.grain > 1

    @property
    def parts_of_sums(self) -> int:
        """The parts of each sum over the tensor-parallel ranks that this rank computes."""
        return self.config.parallel.grain // self.layout.tensor if self.is_bit_equal else 1

    @property
    def head_gradient_elements(self) -> int:
        """Elements of the gradient that a tied head has apart from the embedding's, in bit-equal sums."""
        if not (self.is_bit_equal and self.model.tie_word_embeddings and self.has_last):
            return 0
        return self.local.vocabulary * self.model.hidden_size

    @property
    def token_parts(self) -> int:
        """The parts of this rank's tokens that each have a gradient of all parameters; 0 where no sums have parts."""
        cuts = self.config.parallel.sequence_parts
        return cuts // self.layout.context if self.is_bit_equal and cuts > 1 else 0

    @property
    def has_first(self) -> bool:
        """True if this rank looks up the embedding."""
        return any(stage.is_first for stage in self.stages)

    @property
    def has_last(self) -> bool:
        """True if this rank computes the loss."""
        return any(stage.is_last for stage in self.stages)

    @cached_property
    def micro_batches(self) -> int:
        """m, the micro-batches of a step on each rank."""
        return self.layout.accumulation(self.config.train)

    @property
    def counts_first(self) -> bool:
        """True if a step begins with forward passes that only count."""
        return self.config.optimizer.counts_rows_first(self.micro_batches, self.layout.pipeline)

    @cached_property
    def shard_ranks(self) -> int:
        """n, the ranks over which ZeRO cuts: d·c over the copies; 1 without ZeRO."""
        return self.config.shard_ranks(self.layout.replicas)

    @property
    def offloads(self) -> bool:
        """True if masters and the optimizer's states are in the host's memory."""
        return self.config.optimizer.offload and self.accelerator

    @property
    def frees_gradients(self) -> bool:
        """True if whole gradients have memory only until they are reduced."""
        return self.config.optimizer.zero >= 2 and self.shard_ranks > 1

    @property
    def frees_values(self) -> bool:
        """True if whole matrices have memory only while a unit of the model uses them."""
        return self.config.optimizer.zero == 3 and self.shard_ranks > 1

    @property
    def reductions(self) -> int:
        """The number of times that a step reduces each gradient over data parallelism."""
        each_pass = self.config.optimizer.zero >= 2 and self.config.reduce == "micro_batch"
        return self.micro_batches if each_pass else 1

    @cached_property
    def a(self) -> int:
        """Bytes of an element of an activation."""
        return DTYPE_BYTES[self.precision.parameter]

    def gradient_bytes(self, elements: int) -> int:
        """Bytes of a weight's new gradient, and of the copy that a CPU makes to add it to a sum in another dtype."""
        cast = DTYPE_BYTES[self.precision.gradient]
        return elements * (self.a + (cast if cast != self.a and not self.accelerator else 0))

    def weight_gradient(self, elements: int) -> int:
        """Bytes of a new gradient that is added; where a micro-batch's are freed, it goes to the bucket."""
        is_copied = self.frees_gradients and self.config.reduce == "micro_batch"
        return self.a * elements if is_copied else self.gradient_bytes(elements)

    @cached_property
    def tokens(self) -> int:
        """T, the tokens of a micro-batch that a rank has."""
        return self.config.train.sequence_length * self.config.train.micro_batch // self.layout.context

    @cached_property
    def tokens_between(self) -> int:
        """T/s: tokens that one rank has between the cut layers."""
        return self.tokens // self.sequence_parts

    @cached_property
    def sequence_parts(self) -> int:
        """s, the ranks over which sequence parallelism cuts a rank's tokens."""
        return self.layout.tensor if self.layout.sequence_parallel else 1

    @cached_property
    def x_elements(self) -> int:
        """T/s·H: elements of the residual stream x between the cut layers."""
        return self.tokens_between * self.model.hidden_size

    @cached_property
    def x_bytes(self) -> int:
        """a·T/s·H."""
        return self.a * self.x_elements

    @cached_property
    def gathered_bytes(self) -> int:
        """a·T·H: x after it is gathered over sequence parallelism."""
        return self.a * self.tokens * self.model.hidden_size

    @property
    def rounds_inputs(self) -> bool:
        """True if linear layers of blocks keep their inputs rounded to fp8, in memory of their own."""
        return self.config.precision.matmul is not None

    @property
    def input_width(self) -> int:
        """Bytes of an element of a linear layer's input as it is kept; rounded ones are multiplied by parts as wide."""
        return _FP8 if self.rounds_inputs and not self.has_parts else self.a

    @property
    def product_input_bytes(self) -> int:
        """Bytes of x that a column-parallel layer keeps for its weight's gradient: gathered, or this rank's part."""
        kept = self.x_bytes if self.config.regathers else self.gathered_bytes
        return kept // self.a * self.input_width

    @cached_property
    def probabilities(self) -> int:
        """B·h/t·S²/c: elements of one block's attention probabilities on one rank."""
        heads = self.local.query // self.model.head_dim
        return heads * self.tokens * self.config.train.sequence_length

    @property
    def predicted(self) -> int:
        """Tokens that are predicted: T, or the P·B masked ones of BERT."""
        if not self.model.predicts_masked_tokens:
            return self.tokens
        return self.config.data.predictions(self.config.train.sequence_length) * self.config.train.micro_batch

    @property
    def drops_hidden(self) -> bool:
        """True if training drops some of the numbers that attention and MLP add to x."""
        return self.model.hidden_dropout_p > 0

    @property
    def mask_elements(self) -> int:
        """T/s·H: elements of a dropout mask on what attention or MLP adds to x, one byte each; 0 without dropout."""
        return self.x_elements if self.drops_hidden else 0

    @property
    def inner_mask_elements(self) -> int:
        """T·F/t: elements of a dropout mask inside the MLP, one byte each; 0 without dropout there."""
        return self.tokens * self.local.intermediate if self.model.ffn_dropout_p else 0

    @property
    def attends_by_document(self) -> bool:
        """True if a kernel takes each document of a sample by itself, as accelerators are taken to have in bfloat16."""
        is_asked = self.config.data.reset_attention_mask and not (self.cuts_samples or self.is_bit_equal)
        return is_asked and self.accelerator and self.precision.parameter == "bfloat16"

    @property
    def copies_heads(self) -> bool:
        """True if attention keeps copies of q, k and v, as its kernel takes samples one after the other."""
        return self.attends_by_document and self.config.train.micro_batch > 1

    def dense_mask_elements(self, layers: range) -> int:
        """Return the elements of the dense masks that blocks share: see `AttentionMask.form` in `models/masks.py`.

        They are [B, S/c, S] if documents within a sample are kept apart, and [S/c, S] if a window alone hides keys, or
        context parallelism alone cuts the queries.
        """
        length = self.config.train.sequence_length
        context = self.layout.context
        eager = self.accelerator and not self.config.compile.enabled and length < LONG
        if (not eager or self.attends_by_document) and not self.model.attention_dropout_p:
            return 0
        windows = {self.model.window(layer) for layer in layers}
        if self.config.data.reset_attention_mask:
            return len(windows) * self.config.train.micro_batch * length**2 // context
        hiding = [window for window in windows if self.cuts_samples or (window is not None and window < length)]
        return len(hiding) * length**2 // context

    @cached_property
    def recompute(self) -> Recompute:
        """The part that the backward pass computes again.

        In compiled blocks the compiler chooses what to keep, and `selective` changes only a core step by step.
        """
        is_left_to_compiler = self.config.compile.enabled and not self.attends_step_by_step
        return "none" if is_left_to_compiler and self.config.recompute == "selective" else self.config.recompute

    @property
    def gathers_keys(self) -> bool:
        """True if attention reads copies of keys and values, gathered from the ranks or parts that share samples."""
        return self.cuts_samples and not self.config.passes_keys

    @cached_property
    def gathers_keys_again(self) -> bool:
        """True if the backward pass gets keys and values of other ranks again, which then are not kept."""
        if self.layout.context == 1:
            return False
        return self.recompute == "full" or not (self.attends_step_by_step or self.token_parts > 1)

    @property
    def cuts_samples(self) -> bool:
        """True if the rank's tokens are parts of the sequence, and not all of it in order."""
        return self.layout.context > 1 or self.token_parts > 1

    @cached_property
    def attends_step_by_step(self) -> bool:
        """True if attention computes and keeps its probabilities, because no fused kernel does their dropout."""
        invariant = self.config.train.dropout_mode == "invariant"
        return self.model.attention_dropout_p > 0 and (invariant or not self.accelerator)
