"""What a rank holds at its peak while it works on several micro-batches at once, in its schedule's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.plan.order import Action


@dataclass(frozen=True)
class Pass:
    """Bytes that one micro-batch needs in one stage.

    Attributes:
        kept: held from the forward pass until the gradients of the weights are computed.
        loss: added while the loss is computed.
        loss_kept: the part of it that is held until the backward pass. A backward pass of the input alone copies it.
        backward: the most during the backward pass, with what is still kept by then.
        last: at the end of the backward pass.
        waiting: added to what is kept between the two parts of a split backward pass.
        reduction: while this stage's gradients are reduced, after its last micro-batch.
        onwards: the message to the next stage, which is held until the end of the step.
        back: likewise the message to the stage before.
    """

    kept: int
    loss: int
    loss_kept: int
    backward: int
    last: int
    waiting: int
    reduction: int
    onwards: int = 0
    back: int = 0


@dataclass(frozen=True)
class Peak:
    """The largest numbers of bytes in a step.

    Attributes:
        activations: kept for backward passes.
        forward: the same with what losses need.
        whole: at any time, without messages.
        sent: what messages add to that.
        in_flight: the most passes through one stage that are held at once.
    """

    activations: int
    forward: int
    whole: int
    sent: int
    in_flight: int


def peak(order: Iterable[Action], passes: Mapping[int, Pass], micro_batches: int) -> Peak:
    """The peak of a rank that does its actions in this order.

    Args:
        order: the actions.
        passes: what a micro-batch needs, by stage.
        micro_batches: of a step.
    """
    activations = forward = whole = with_sent = in_flight = 0
    kept = beside = sent = 0
    flying: Counter[int] = Counter()
    done: Counter[int] = Counter()
    for action in order:
        one = passes[action.stage]
        now = 0
        if action.kind == "forward":
            now = kept + beside + one.kept + one.loss
            kept, beside = kept + one.kept, beside + one.loss_kept
            flying[action.stage] += 1
            activations, in_flight = max(activations, kept), max(in_flight, flying[action.stage])
            forward = max(forward, now)
            sent += one.onwards
        elif action.kind == "input":
            if action.stage > 0:  # torch leaves all of the first stage to the gradients of the weights
                copied = kept + beside + one.loss_kept
                now = max(copied, kept + beside - one.kept - one.loss_kept + one.backward)
                kept += one.waiting
                activations, forward = max(activations, kept), max(forward, kept + beside)
                now = max(now, kept + beside)
                sent += one.back
        else:
            kept, beside = kept - one.kept, beside - one.loss_kept
            if action.kind == "weight" and action.stage > 0:
                kept -= one.waiting
            now = kept + beside + max(one.backward, one.last)
            flying[action.stage] -= 1
            done[action.stage] += 1
            if done[action.stage] == micro_batches:
                now = max(now, kept + beside + one.reduction)
            sent += one.back if action.kind == "backward" else 0
        whole, with_sent = max(whole, now), max(with_sent, now + sent)
    return Peak(activations, forward, whole, max(with_sent, sent) - whole, in_flight)
