"""What a pipeline's step took: each stage's work, and the part of the step in which ranks waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise import comm
from shardwise.mesh import Mesh
from shardwise.pipeline.clock import FORWARD, Clock


@dataclass(frozen=True)
class StageSeconds:
    """What this rank worked on one of its stages in a step."""

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
    """Of the last step. Collective over the pipeline.

    The step is as long as on the rank that had to do with it longest: the last stage is done before its gradient has
    come to the first one.
    """
    spans = clock.spans()
    found = []
    for stage in stages:
        seconds = [0.0, 0.0]
        for span in spans:
            if span.stage == stage:
                seconds[span.kind != FORWARD] += span.end - span.start
        found.append(StageSeconds(stage, *seconds))
    here = torch.tensor([[sum(each.forward + each.backward for each in found), clock.window]], dtype=torch.float64)
    busy_P, window_P = comm.all_gather(here.to(mesh.device), mesh.pp).cpu().unbind(1)
    longest = float(window_P.max())
    return StepTiming(tuple(found), 1 - float(here[0, 0]) / longest, 1 - float(busy_P.mean()) / longest)
