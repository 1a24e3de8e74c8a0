"""How long a pipeline's step took: each stage's work, and the part of the step in which ranks waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise import comm
from shardwise.mesh import Mesh
from shardwise.pipeline.clock import FORWARD, Clock


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a step in which this rank worked on one of its stages."""

    stage: int
    forward: float
    backward: float


@dataclass(frozen=True)
class StepTiming:
    """A step on this rank.

    Attributes:
        stages: its stages' work.
        bubble: the part of the pipeline's step in which this rank did not work.
        mean_bubble: over the pipeline's ranks.
    """

    stages: tuple[StageSeconds, ...]
    bubble: float
    mean_bubble: float


def measure(clock: Clock, stages: Sequence[int], mesh: Mesh) -> StepTiming:
    """The timing of the last step. Collective over the pipeline.

    The step's length is that of the rank on which it took longest: the last stage is done before the first stage has
    received its gradient.
    """
    spans = clock.spans()
    stage_seconds = []
    for stage in stages:
        seconds = [0.0, 0.0]
        for span in spans:
            if span.stage == stage:
                seconds[span.kind != FORWARD] += span.end - span.start
        stage_seconds.append(StageSeconds(stage, *seconds))
    busy = sum(seconds.forward + seconds.backward for seconds in stage_seconds)
    here = torch.tensor([[busy, clock.window]], dtype=torch.float64)
    busy_P, window_P = comm.all_gather(here.to(mesh.device), mesh.pp).cpu().unbind(1)
    longest = float(window_P.max())
    return StepTiming(tuple(stage_seconds), 1 - float(here[0, 0]) / longest, 1 - float(busy_P.mean()) / longest)
