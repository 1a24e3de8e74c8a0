"""One configuration on one layout, as the formulas of `cost/` read it.

Legend: S sequence length, B micro batch, T = S·B tokens, P predicted positions of a sequence, H hidden size, F
intermediate size, V vocabulary, L blocks, h heads, q = h · head_dim, kv = key/value heads · head_dim, t tensor-parallel
degree, s = t under sequence parallelism, else 1, d data-parallel degree, p pipeline degree, m micro-batches of a step,
a bytes of an activation (those of a parameter).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import DTYPE_BYTES, BertConfig, Config, FamilyConfig, Layout, OwnConfig, Precision
from shardwise.plan.parameters import LocalWidths
from shardwise.plan.partition import stage_plan
from shardwise.plan.stage import Stage


@dataclass(frozen=True)
class Case:
    """The inputs of the formulas, for one pipeline rank.

    Attributes:
        config: the whole configuration.
        layout: its layout.
        model: its model, of a family whose shapes are known.
        precision: its dtypes, resolved.
        local: widths of one rank's part.
        accelerator: whether the run is on one.
        pipeline_rank: the rank in question.
        stages: the stages of that rank; without a pipeline one, which is the model.
    """

    config: Config
    layout: Layout
    model: FamilyConfig
    precision: Precision
    local: LocalWidths
    accelerator: bool
    pipeline_rank: int
    stages: tuple[Stage, ...]

    @staticmethod
    def of(config: Config, layout: Layout, accelerator: bool, pipeline_rank: int = 0) -> Case | None:
        """The case of one pipeline rank; None for a model of your own, of which nothing is known before it is built."""
        cases = Case.of_ranks(config, layout, accelerator)
        return cases[pipeline_rank] if cases else None

    @staticmethod
    def of_ranks(config: Config, layout: Layout, accelerator: bool) -> list[Case]:
        """The cases of all pipeline ranks; empty for a model of your own."""
        model = config.model
        if isinstance(model, OwnConfig):
            return []
        local = LocalWidths.of(model, layout.tensor, config.parallel.vocab_multiple)
        precision, plan = config.precision.resolved(accelerator), stage_plan(config, layout)
        return [
            Case(
                config,
                layout,
                model,
                precision,
                local,
                accelerator,
                pipeline_rank=rank,
                stages=tuple(stage for stage in plan if stage.rank == rank),
            )
            for rank in range(layout.pipeline)
        ]

    @property
    def layers(self) -> int:
        """Blocks on this rank: L / p, where they are dealt out evenly."""
        return sum(len(stage.layers) for stage in self.stages)

    @property
    def has_first(self) -> bool:
        """Whether this rank looks up the embedding."""
        return any(stage.is_first for stage in self.stages)

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the loss."""
        return any(stage.is_last for stage in self.stages)

    @property
    def micro_batches(self) -> int:
        """m."""
        return self.layout.accumulation(self.config.train)

    @property
    def a(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.precision.parameter]

    def gradient_bytes(self, elements: int) -> int:
        """Of a weight's gradient until it is added up: as computed, and cast to the gradients' dtype if it differs."""
        cast = DTYPE_BYTES[self.precision.gradient]
        return elements * (self.a + (cast if cast != self.a else 0))

    @property
    def tokens(self) -> int:
        """T."""
        return self.config.train.sequence_length * self.config.train.micro_batch

    @property
    def tokens_between(self) -> int:
        """T/s: tokens that one rank has between the cut layers."""
        return self.tokens // self.layout.tensor if self.layout.sequence else self.tokens

    @property
    def x_elements(self) -> int:
        """T/s·H: elements of the residual stream x between the cut layers."""
        return self.tokens_between * self.model.hidden_size

    @property
    def x_bytes(self) -> int:
        """a·T/s·H."""
        return self.a * self.x_elements

    @property
    def gathered_bytes(self) -> int:
        """a·T·H: x after it is gathered over sequence parallelism."""
        return self.a * self.tokens * self.model.hidden_size

    @property
    def probabilities(self) -> int:
        """B·h/t·S²: elements of one block's attention probabilities on one rank."""
        heads = self.local.query // self.model.head_dim
        return heads * self.tokens * self.config.train.sequence_length

    @property
    def predicted(self) -> int:
        """Tokens that the head sees: T, or the P·B masked ones of BERT."""
        if not isinstance(self.model, BertConfig):
            return self.tokens
        return self.config.data.predictions(self.config.train.sequence_length) * self.config.train.micro_batch

    @property
    def drops_hidden(self) -> bool:
        """Whether training drops parts of what attention and MLP add to the residual stream."""
        return self.model.hidden_dropout_p > 0

    @property
    def attends_step_by_step(self) -> bool:
        """Whether attention holds its probabilities, since no fused kernel does their dropout."""
        invariant = self.config.train.dropout_mode == "invariant"
        return self.model.attention_dropout_p > 0 and (invariant or not self.accelerator)
