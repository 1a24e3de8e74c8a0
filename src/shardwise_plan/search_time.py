"""The time of a step as a search asks for it: at least so much, whatever the schedule and the sharding."""

from __future__ import annotations

from collections import Counter

from shardwise.config import Config, Layout
from shardwise.estimates.memory_choice import candidates
from shardwise.models.parameter_counts import kinds_of_blocks
from shardwise.pipeline.partition import stage_plan
from shardwise_plan.device_seconds import constants_of
from shardwise_plan.device_specs import Cluster
from shardwise_plan.layout_choices import Choice, compiled
from shardwise_plan.step_time import least_times, part_seconds, shardwise_traits


class LeastTime:
    """Seconds of a step that no schedule and no sharding can beat. It computes once what layouts have in common."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self._config = config
        self._cluster = cluster
        self._constants = constants_of(cluster.device)
        model = config.known_shapes
        self._kinds = [routing for routing, _ in kinds_of_blocks(model, range(model.num_hidden_layers))]
        self._seconds: dict[tuple[object, ...], list[list[tuple[float, float]]]] = {}
        self._numbers: dict[tuple[object, ...], list[list[tuple[int, int]]]] = {}

    def __call__(self, choice: Choice, layout: Layout) -> float:
        """Return the seconds in which the pipeline rank that takes longest does its work, at least.

        A rank begins when the first micro-batch has passed the stages before its own. Its last backward pass is one of
        its first stage, which those of the stages before follow; but gradients of weights that are computed apart may
        be later still. Messages, other waits and the update are left out, which only add to it.
        """
        m = self._config.train.global_batch // (choice.micro_batch * layout.data)
        returns = not choice.splits_backward or choice.recompute == "full"
        return min(
            max(
                sum(
                    forward * (m * own + before) + backward * (m * own + returns * before)
                    for (forward, backward), (own, before) in zip(seconds, numbers, strict=True)
                )
                for numbers in self._numbers_of_parts(choice, layout)
            )
            for seconds in self._seconds_of_parts(choice, layout)
        )

    def step(self, shardings: list[Choice], layout: Layout, passes: float | None) -> float:
        """Return the seconds of the fastest step of choices that differ in how data parallelism is sharded, at least.

        passes: seconds of the passes, at least; None: they are simulated.
        """
        chosen = compiled(shardings[0].applied(self._config), self._cluster.device)
        return min(
            seconds
            for candidate in candidates(chosen, layout)
            for seconds in least_times(
                [candidate, *(choice.sharded(candidate) for choice in shardings[1:])], layout, self._cluster, passes
            )
        )

    def _seconds_of_parts(self, choice: Choice, layout: Layout) -> list[list[tuple[float, float]]]:
        """Return the seconds of a forward and a backward pass in each part, for each choice that is left to memory.

        Parts are the kinds of blocks, the embedding, the head, and what a stage takes beside them.
        """
        key = (*layout.inside_a_stage, layout.pipeline > 1, choice.splits_backward)
        key += (choice.micro_batch, choice.recompute, choice.zero >= 2)
        if key not in self._seconds:
            action = self._constants.action if layout.pipeline > 1 else 0.0
            self._seconds[key] = []
            for config in candidates(compiled(choice.applied(self._config), self._cluster.device), layout):
                program = shardwise_traits(config, self._cluster)
                blocks, *ends = part_seconds(config, layout, self._cluster, program, self._constants)
                parts = [*(blocks[routing] for routing in self._kinds), *ends]
                seconds = [(part.forward.total, part.backward.total) for part in parts]
                self._seconds[key].append([*seconds, (action, action)])
        return self._seconds[key]

    def _numbers_of_parts(self, choice: Choice, layout: Layout) -> list[list[tuple[int, int]]]:
        """Return the numbers of these parts on each rank, and in the stages before its first one.

        Of ranks with the same parts, the last one waits longest.
        """
        key = (choice.pipeline, choice.schedule, choice.virtual)
        if key not in self._numbers:
            model = self._config.known_shapes
            by_parts: dict[tuple[int, ...], tuple[int, ...]] = {}
            stages = stage_plan(choice.applied(self._config), layout)

            def numbers(rank: int, stop: int) -> tuple[int, ...]:
                found = [stage for stage in stages[:stop] if stage.rank == rank or rank < 0]
                blocks = Counter[object]()
                for stage in found:
                    blocks.update(dict(kinds_of_blocks(model, stage.layers)))
                ends = (sum(stage.is_first for stage in found), sum(stage.is_last for stage in found))
                return (*(blocks[kind] for kind in self._kinds), *ends, len(found))

            # Stages are dealt out in rounds, so that the first stage of a rank has the rank's number.
            for rank in range(layout.pipeline):
                by_parts[numbers(rank, len(stages))] = numbers(-1, rank)
            self._numbers[key] = [list(zip(own, before, strict=True)) for own, before in by_parts.items()]
        return self._numbers[key]
