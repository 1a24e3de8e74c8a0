"""What a pipeline rank holds at its peak, with several micro-batches in flight, in the order of its schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.pipeline.action_order import Action


@dataclass(frozen=True)
class Pass:
    """Bytes that one micro-batch needs in one stage.

    Attributes:
        kept: from the forward pass until the gradients of the weights are computed.
        loss: beside that, while the loss is computed.
        loss_kept: the part of `loss` that is held until the backward pass. The first half of a split one copies it.
        backward: the most during the backward pass, with what is still kept.
        last: at the end of the backward pass.
        waiting: beside what is kept, between the two halves of a split backward pass.
        reduction: while this stage's gradients are reduced, after its last micro-batch.
        split: beside what is kept, the most during the first half of a split backward pass.
        onwards: the message to the next stage, which is held until the end of the step.
        back: the message to the previous stage, held likewise.
    """

    kept: int
    loss: int
    loss_kept: int
    backward: int
    last: int
    waiting: int
    reduction: int
    split: int = 0
    onwards: int = 0
    back: int = 0


@dataclass(frozen=True)
class Peak:
    """The largest numbers of bytes in a step.

    Attributes:
        activations: kept for backward passes.
        forward: activations with what losses need.
        whole: at any time, without messages.
        sent: what messages add to `whole`.
        in_flight: the most micro-batches of one stage whose activations are held at once.
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
    activations = forward = whole = with_sent = in_flight = 0  # the largest values so far
    kept = losses = sent = 0  # held now: of stages, of losses, of messages
    started: Counter[int] = Counter()
    done: Counter[int] = Counter()
    for action in order:
        needs = passes[action.stage]
        now = 0
        if action.kind == "forward":
            now = kept + losses + needs.kept + needs.loss
            kept, losses = kept + needs.kept, losses + needs.loss_kept
            started[action.stage] += 1
            activations = max(activations, kept)
            in_flight = max(in_flight, started[action.stage] - done[action.stage])
            forward = max(forward, now)
            sent += needs.onwards
        elif action.kind == "input":
            if action.stage > 0:  # torch's first stage does all of its backward pass with the gradients of the weights
                with_copy = kept + losses + needs.loss_kept
                now = max(with_copy, kept + losses - needs.kept - needs.loss_kept + needs.backward)
                now = max(now, kept + losses + needs.split)
                kept += needs.waiting
                activations, forward = max(activations, kept), max(forward, kept + losses)
                now = max(now, kept + losses)
                sent += needs.back
        else:
            kept, losses = kept - needs.kept, losses - needs.loss_kept
            if action.kind == "weight" and action.stage > 0:
                kept -= needs.waiting
            now = kept + losses + max(needs.backward, needs.last)
            done[action.stage] += 1
            if done[action.stage] == micro_batches:
                now = max(now, kept + losses + needs.reduction)
            sent += needs.back if action.kind == "backward" else 0
        whole, with_sent = max(whole, now), max(with_sent, now + sent)
    return Peak(activations, forward, whole, max(with_sent, sent) - whole, in_flight)
