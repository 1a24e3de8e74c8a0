"""The experts that routers choose in a training: recorded by token, counted against one process, and replayed.

Where two experts have nearly the same score for a token, rounding decides, and a layout may choose another one than one
process does. Its loss and gradients then differ by more than rounding, though it computes right. With the choices of
one process replayed they must not, and the scores must show that each choice that differs was so close.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Group
from shardwise.layers.dropout import DropoutKey
from shardwise.layers.experts import Experts, choose
from shardwise.models.attention import Block
from shardwise.models.blocks import BlockContext
from shardwise.verify.tolerance import ChoiceDifferences

_R = TypeVar("_R")

_Token = tuple[tuple[str, int], int]  # a recorded sequence, and a place in it
Recorded = Mapping[tuple[str, int], Tensor]
"""Experts `[S, k]` of the tokens of each sequence, by the canonical name of the router and the sample's number."""


def train_with_choices(
    train: Callable[[RecordedChoices], _R], reference: Recorded, tolerance: float, world: Group
) -> tuple[_R, ChoiceDifferences]:
    """Return the result of a cell's training, repeated with the reference's choices of experts if its own differ.

    Collective.

    Args:
        tolerance: rounding error of a score, relative to the largest score of its token.
    """
    own_choices = RecordedChoices(reference, tolerance)
    result = train(own_choices)
    differing = sum(_joined(own_choices.differing, world).values())
    if not differing:
        return result, ChoiceDifferences()
    replayed = RecordedChoices(reference, tolerance, replays=True)
    result = train(replayed)
    wrong = min(_joined(replayed.wrong, world), default=None)
    text = ""
    if wrong is not None:
        (router, sample), place = wrong
        text = f"the choice of experts by {router} for token {place} of sample {sample}"
    return result, ChoiceDifferences(differing, text)


def _joined(of_rank: dict[Any, int], world: Group) -> dict[Any, int]:
    """Return the entries of all ranks, of which several have the same token. Collective."""
    joined: dict[Any, int] = {}
    for entries in collectives.all_gather_objects(of_rank, world):
        joined |= entries
    return joined


@dataclass
class RecordedChoices:
    """The experts that the routers of a verified training choose."""

    reference: Recorded = field(default_factory=dict)  # choices of one process; empty: there are none to compare with
    tolerance: float = 0.0
    replays: bool = False  # true if routers take the experts of the reference
    # Choices of this training, if there is no reference: one process has all tokens.
    recorded: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    # Number of experts of a token that the reference has not, by recorded sequence and place in it.
    differing: dict[_Token, int] = field(default_factory=dict)
    # Likewise, where the scores of the chosen experts and those of the reference differ by more than rounding.
    wrong: dict[_Token, int] = field(default_factory=dict)
    _key: DropoutKey | None = None

    def follow(self, model: nn.Module, length: int) -> None:
        """Follow the routers of a model's blocks from now on, in samples of `length` tokens."""
        for block in model.modules():
            if isinstance(block, Block):
                layers = [layer for layer in block.modules() if isinstance(layer, Experts)]
                for layer in layers:
                    layer.router.choose = partial(self._choose, layer, length)
                if layers:
                    block.register_forward_pre_hook(self._remember)

    def _remember(self, block: nn.Module, arguments: tuple[Tensor, BlockContext]) -> None:
        """Keep the key that says which tokens a block computes; recompute calls the block with the same one."""
        key = arguments[1].dropout
        assert key is None or isinstance(key, DropoutKey), "compiled blocks are not followed"
        self._key = key

    def _choose(self, layer: Experts, length: int, scores: Tensor) -> Tensor:
        chosen = choose(layer.router.routing, scores)
        if self._key is None:
            # An evaluation.
            return chosen
        samples = self._key.samples_B.tolist()
        rows = len(scores) // len(samples)
        cuts, rank = (layer.group.size, layer.group.rank) if layer.sequence_parallel_enabled else (1, 0)
        places = self._key.places_S
        if places is None:
            places = torch.arange(length, device=scores.device)
        places = places.chunk(cuts)[rank].cpu()
        assert len(places) == rows, "a rank computes all its tokens at once"
        name = placement.of_or_whole(layer.router.weight).pieces[0].name.removesuffix(".weight")
        if not self.reference:
            for sample, experts in zip(samples, chosen.cpu().unflatten(0, (rows, -1)).unbind(1), strict=True):
                self.recorded[name, sample] = experts
            return chosen
        by_sample = [self.reference[name, sample][places] for sample in samples]
        reference_experts = torch.stack(by_sample, dim=1).flatten(0, 1).to(chosen)
        tokens = [((name, sample), place) for place in places.tolist() for sample in samples]
        self._compare(layer, scores, chosen, reference_experts, tokens)
        return reference_experts if self.replays else chosen

    def _compare(
        self, layer: Experts, scores: Tensor, chosen: Tensor, reference_experts: Tensor, tokens: Sequence[_Token]
    ) -> None:
        missing = (chosen.unsqueeze(2) != reference_experts.unsqueeze(1)).all(2).sum(1)
        if not missing.any():
            return
        # Near ties: the experts of the reference win if their scores are some errors larger, and the others' smaller.
        # Those of both rise too, as a group that both have open must not close.
        error = (self.tolerance * scores.abs().amax(1, keepdim=True)).expand_as(chosen)
        nudged = scores.scatter_add(1, chosen, -error).scatter_add(1, reference_experts, 2 * error)
        is_wrong = (choose(layer.router.routing, nudged) != reference_experts).any(1)
        for row in missing.nonzero().flatten().tolist():
            self.differing[tokens[row]] = int(missing[row])
            if is_wrong[row]:
                self.wrong[tokens[row]] = int(missing[row])
