"""The rule by which the router of a sparse model chooses experts. Models and formulas read it; it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal

Scores = Literal["softmax", "sigmoid"]
OBJECTIVES = ("sequence", "batch", "pooled", "z")
"""Names of the objectives of routers (`layers/balance.py`), in the order of their values."""
SUMS = ("entropy", *OBJECTIVES)
"""What a layer of experts adds up beside its loads, in this order."""


@dataclass(frozen=True)
class Routing:
    """The rule by which a router chooses experts, and their weights.

    Attributes:
        experts: N, the number of experts.
        per_token: k, experts of a token.
        scores: function of the logits that gives an expert's score.
        normalized: true if the weights of a token's experts are divided by their sum.
        scale: factor on the weights.
        groups: number of runs of neighbouring experts of which `chosen_groups` are open to a token: those with the
            largest sums of their two best scores.
        chosen_groups: see `groups`.
        has_bias: true if a bias, which the balance of loads updates and no gradient, is added to the scores for the
            choice alone (arXiv:2408.15664).
    """

    experts: int
    per_token: int
    scores: Scores = "softmax"
    normalized: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    has_bias: bool = False

    def visits(self, ranks: int) -> float:
        """Return how many of the ranks that divide the experts have some of a token's: the mean over all choices."""
        # Exact if ranks have whole groups, or groups the experts of whole ranks.
        # Open groups are drawn first, then experts of theirs. A rank has `local` experts of each of `groups` groups.
        group, rank_experts = self.experts // self.groups, self.experts // ranks
        groups, local = max(rank_experts // group, 1), min(rank_experts, group)
        chosen, missed = self.chosen_groups, 0.0
        for hit in range(min(groups, chosen) + 1):
            drawn = comb(groups, hit) * comb(self.groups - groups, chosen - hit) / comb(self.groups, chosen)
            remote_choices = comb(group * chosen - local * hit, self.per_token)
            missed += drawn * remote_choices / comb(group * chosen, self.per_token)
        return ranks * (1 - missed)
