"""The peak memory of a pipeline rank that has several micro-batches in flight, in the order of its schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.pipeline.action_order import Action


@dataclass(frozen=True)
class PassBytes:
    """Estimated bytes that one micro-batch needs in one stage."""

    kept: int  # bytes from the forward pass until the gradients of the weights are computed
    loss: int  # more bytes than `kept` while the loss is computed
    loss_kept: int  # part of `loss` that is held until the backward pass. The first half of a split one copies it
    backward: int  # the most during the backward pass, with the part of `kept` that is not free yet
    last: int  # bytes at the end of the backward pass
    waiting: int  # more bytes than `kept` between the two halves of a split backward pass
    reduction: int  # the most during the last micro-batch's backward pass, while this stage's gradients are reduced
    split: int = 0  # more bytes than `kept` at the peak of the first half of a split backward pass
    onwards: int = 0  # message to the next stage
    back: int = 0  # message to the previous stage, which is held until the end of the step
    forward: int = 0  # more bytes than `kept` at some time of the forward pass before the loss


@dataclass(frozen=True)
class StepPeak:
    """The estimated peak of a step: its largest numbers of bytes."""

    activations: int  # bytes kept for backward passes
    forward: int  # activations and the bytes that losses need
    whole: int  # bytes at any time, without messages
    sent: int  # bytes that messages add to `whole`
    in_flight: int  # largest number of micro-batches of one stage whose activations are held at once


def step_peak(
    order: Iterable[Action], passes: Mapping[int, PassBytes], micro_batches: int, *, frees_onwards: bool = False
) -> StepPeak:
    """Return the estimated peak of a rank that does its actions in this order.

    Args:
        order: actions of the rank.
        passes: needs of a micro-batch, by stage.
        micro_batches: number of micro-batches of a step.
        frees_onwards: true if a message to the next stage is held until the micro-batch's gradient has come back and
            gone through the stage, false if until the end of the step.
    """
    ledger = _Ledger(micro_batches)
    for action in order:
        needs = passes[action.stage]
        match action.kind:
            case "forward":
                ledger.forward(action.stage, needs)
            case "input" if action.stage > 0:
                ledger.input_gradient(needs)
            case "input":
                pass  # torch's first stage does all of its backward pass together with the gradients of the weights
            case "backward" | "weight":
                ledger.end_of_backward(action, needs)
        if frees_onwards and action.kind in ("input", "backward"):
            ledger.sent -= needs.onwards
    return ledger.peak()


class _Ledger:
    """The bytes that a rank holds at the moment, and the largest values so far.

    Attributes:
        kept: bytes of activations.
        losses: bytes of losses.
        sent: bytes of messages.
    """

    def __init__(self, micro_batches: int) -> None:
        self.kept = 0
        self.losses = 0
        self.sent = 0
        self._micro_batches = micro_batches
        self._forward_count: Counter[int] = Counter()
        self._backward_count: Counter[int] = Counter()
        self._most_activations = 0
        self._most_forward = 0
        self._most = 0
        self._most_with_messages = 0
        self._most_in_flight = 0

    def forward(self, stage: int, needs: PassBytes) -> None:
        during = self.kept + self.losses + needs.kept + max(needs.loss, needs.forward)
        self.kept += needs.kept
        self.losses += needs.loss_kept
        self.sent += needs.onwards
        self._forward_count[stage] += 1
        in_flight = self._forward_count[stage] - self._backward_count[stage]
        self._most_in_flight = max(self._most_in_flight, in_flight)
        self._most_activations = max(self._most_activations, self.kept)
        self._most_forward = max(self._most_forward, during)
        self._note(during)

    def input_gradient(self, needs: PassBytes) -> None:
        """Do the first half of a split backward pass, which frees nothing that was kept."""
        before = self.kept + self.losses
        with_copied_loss = before + needs.loss_kept
        in_blocks = before - needs.kept - needs.loss_kept + needs.backward
        self.kept += needs.waiting
        afterwards = self.kept + self.losses
        self.sent += needs.back
        self._most_activations = max(self._most_activations, self.kept)
        self._most_forward = max(self._most_forward, afterwards)
        self._note(max(with_copied_loss, in_blocks, before + needs.split, afterwards))

    def end_of_backward(self, action: Action, needs: PassBytes) -> None:
        """Do a whole backward pass or the second half of a split one: it frees what the micro-batch kept."""
        self.kept -= needs.kept
        self.losses -= needs.loss_kept
        if action.kind == "weight" and action.stage > 0:
            self.kept -= needs.waiting
        if action.kind == "backward":
            self.sent += needs.back
        during = self.kept + self.losses + max(needs.backward, needs.last)
        self._backward_count[action.stage] += 1
        if self._backward_count[action.stage] == self._micro_batches:
            during = max(during, self.kept + self.losses + needs.reduction)
        self._note(during)

    def _note(self, during: int) -> None:
        self._most = max(self._most, during)
        self._most_with_messages = max(self._most_with_messages, during + self.sent)

    def peak(self) -> StepPeak:
        return StepPeak(
            activations=self._most_activations,
            forward=self._most_forward,
            whole=self._most,
            sent=max(self._most_with_messages, self.sent) - self._most,
            in_flight=self._most_in_flight,
        )
