"""A layout with its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.config import Config, FamilyConfig, Layout
from shardwise.estimates.memory import RESERVED, MemoryEstimate, expected_memory
from shardwise.estimates.memory_choice import fitted_to_memory
from shardwise.models.flops import flops_per_token, model_flops_utilization
from shardwise.pipeline.timeline import Timeline
from shardwise_plan.data_stages import stages_with_layout
from shardwise_plan.device_specs import Cluster, Device
from shardwise_plan.goodput import Calendar, calendar
from shardwise_plan.layout_choices import LayoutChoice
from shardwise_plan.step_time import StepTime, predicted_timeline, step_time

TIGHT = 0.1
"""Share of a device's memory that must be free for a layout that surely fits."""
_SAME_TIME = 1.04
"""Ratio of two predicted times up to which a difference in details alone is no reason to list both layouts."""


@dataclass(frozen=True)
class Plan:
    """A layout with its prediction.

    Attributes:
        choice: keys that the layout sets.
        config: the configuration with these keys.
        layout: degrees of parallelism.
        cluster: devices that it runs on.
        time: time of a step.
        memory: memory of the rank that needs most, in the stage of the run that needs most.
        like: family's model from which a model of the user's own is predicted.
    """

    choice: LayoutChoice
    config: Config
    layout: Layout
    cluster: Cluster
    time: StepTime
    memory: MemoryEstimate
    like: FamilyConfig | None = None

    @property
    def sized(self) -> Config:
        """The configuration with a model whose shapes are known."""
        return self.config if self.like is None else self.config.model_copy(update={"model": self.like})

    def text(self) -> str:
        """Return the layout in one line."""
        return self.choice.text(self.cluster.world)

    @property
    def tokens_per_second(self) -> float:
        train = self.config.train
        return train.global_batch * train.sequence_length / self.time.total

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the peak; masked attention and recompute do not count."""
        train = self.config.train
        predictions = self.config.data.predictions(train.sequence_length)
        flops = flops_per_token(self.sized.model, train.sequence_length, predictions)
        precision = self.config.precision.resolved(self.cluster.device.is_accelerator)
        peak = self.cluster.device.peak(precision.parameter)
        return model_flops_utilization(flops, self.tokens_per_second, self.cluster.world, peak)

    @property
    def reserve(self) -> float:
        """Bytes of the device for its context, the collectives' buffers and the allocator's gaps."""
        return self.cluster.device.memory * RESERVED

    @property
    def headroom(self) -> float:
        """Bytes of the device that neither the run nor its context need."""
        return self.cluster.device.memory - self.reserve - self.memory.total

    @property
    def is_tight(self) -> bool:
        """True if less than a tenth of the device's memory is free."""
        return self.headroom < TIGHT * self.cluster.device.memory

    @property
    def frees_parts(self) -> bool:
        """True if a rank frees the gradients or the weights of others."""
        return self.choice.zero >= 2 and self.layout.replicas > 1

    @cached_property
    def seconds(self) -> float:
        """Seconds of all steps of all stages, without evaluations, checkpoints and restarts."""
        seconds = 0.0
        config = self.sized
        for stage in stages_with_layout(config, self.layout):
            time = self.time if stage is config else step_time(stage, self.layout, self.cluster)
            assert time is not None, "the shapes of the model are known"
            seconds += time.total * (stage.last_step - stage.steps_before)
        return seconds

    @cached_property
    def calendar(self) -> Calendar:
        """The time of the training with evaluations, checkpoints and failures."""
        return calendar(self.sized, self.cluster, self.seconds / self.config.train.steps)

    @property
    def device_hours(self) -> float:
        """Hours of all devices on the calendar."""
        return self.calendar.seconds * self.cluster.world / 3600

    @property
    def cost(self) -> float | None:
        """Price of the training in the currency of the device's price; None if it has none."""
        price = self.cluster.price_per_hour
        return None if price is None else price * self.calendar.seconds / 3600

    @property
    def kilowatt_hours(self) -> float | None:
        """Energy of the devices, without hosts, network and cooling; None if their power is unknown."""
        watts = self.cluster.device.watts
        return None if watts is None else watts * self.device_hours / 1000

    def timeline(self) -> Timeline:
        """Return the passes of a step on each pipeline rank."""
        return predicted_timeline(self.sized, self.layout, self.cluster)

    def on(self, device: Device) -> Plan:
        """Return the same layout on other devices, whose memory is not asked again."""
        cluster = replace(self.cluster, device=device)
        time = step_time(self.sized, self.layout, cluster)
        assert time is not None, "the shapes of the model are known"
        return replace(self, cluster=cluster, time=time)


def distinct_plans(plans: Sequence[Plan]) -> list[int]:
    """Return the indices of the plans that differ from each faster plan by more than details.

    Details are the schedule, its stages, the micro-batch, recompute and sequence parallelism, where the times differ by
    at most 4%. A plan whose memory is not tight is listed beside a faster one whose memory is.
    """
    listed: dict[tuple[object, ...], Plan] = {}
    indices = []
    for index, plan in enumerate(plans):
        choice = plan.choice
        key = (plan.cluster.nodes, choice.tensor, choice.context, choice.pipeline, choice.zero, choice.replicate)
        former = listed.get(key)
        is_detail = former is not None and plan.time.total <= _SAME_TIME * former.time.total
        if not is_detail or (former is not None and former.is_tight and not plan.is_tight):
            listed[key] = plan
            indices.append(index)
    return indices


def predict_layout(config: Config, layout: Layout, cluster: Cluster) -> Plan | None:
    """Return the prediction for a given layout, whether or not it fits; None for a model of your own."""
    device = cluster.device
    room = device.memory * (1 - RESERVED)
    config = fitted_to_memory(config, layout, room, accelerator=device.is_accelerator, device=device.name)
    time = step_time(config, layout, cluster)
    memory = expected_memory(config, layout, cluster.device.is_accelerator)
    if time is None or memory is None:
        return None
    return Plan(LayoutChoice.of(config, layout), config, layout, cluster, time, memory)
