"""What a rank holds at its peak while it works on several micro-batches at once, in its schedule's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.cost.order import Work


@dataclass(frozen=True)
class Pass:
    """Bytes of one micro-batch's way through one stage.

    Attributes:
        kept: from the forward pass until the gradients of the weights are there.
        loss: what the loss takes on top while it is made. loss_kept: what of it waits for the backward pass.
        backward: at most during the backward pass, with what is still kept by then. last: at its end.
        waiting: on top of what is kept, where gradients of the weights come later than that of the input.
        reduction: while this stage's gradients are reduced, behind its last micro-batch.
    """

    kept: int
    loss: int
    loss_kept: int
    backward: int
    last: int
    waiting: int
    reduction: int


@dataclass(frozen=True)
class Peak:
    """Bytes at most.

    Attributes:
        activations: kept for backward passes. forward: with what losses take or keep. whole: at any time.
        in_flight: passes through one stage that are held at once.
    """

    activations: int
    forward: int
    whole: int
    in_flight: int


def peak(order: Iterable[Work], passes: Mapping[int, Pass], micro_batches: int) -> Peak:
    """Of a rank that works in this order on stages with these passes."""
    activations = forward = whole = in_flight = 0
    kept = beside = 0
    flying: Counter[int] = Counter()
    done: Counter[int] = Counter()
    for work in order:
        one = passes[work.stage]
        if work.kind == "forward":
            forward = max(forward, kept + beside + one.kept + one.loss)
            kept, beside = kept + one.kept, beside + one.loss_kept
            flying[work.stage] += 1
            activations, in_flight = max(activations, kept), max(in_flight, flying[work.stage])
        elif work.kind == "input":
            if work.stage > 0:  # torch leaves all of the first stage to the gradients of the weights
                whole = max(whole, kept + beside - one.kept - one.loss_kept + one.backward)
                kept += one.waiting
                activations, forward = max(activations, kept), max(forward, kept + beside)
        else:
            kept, beside = kept - one.kept, beside - one.loss_kept
            if work.kind == "weight" and work.stage > 0:
                kept -= one.waiting
            whole = max(whole, kept + beside + max(one.backward, one.last))
            flying[work.stage] -= 1
            done[work.stage] += 1
            if done[work.stage] == micro_batches:
                whole = max(whole, kept + beside + one.reduction)
    return Peak(activations, forward, max(whole, forward), in_flight)
