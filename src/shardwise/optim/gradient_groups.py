"""Gradients of groups of micro-batches, added in pairs, so that the order of the sum is the same at any layout.

The micro-batches of a step are D groups of neighbours (`train.data_grain`), of which each data-parallel rank has a run.
The gradients of a group are added one after the other, those of two neighbouring groups then, and so on: the sum over a
rank's groups is a node of the binary tree whose upper levels the ranks add (`collectives.tree_sum`).
"""

from __future__ import annotations

from torch import Tensor


class GroupSums:
    """The sums over the groups of one gradient that have ended: at most log2 of their number, each of other length.

    Args:
        gradient: tensor in which the gradients of the present group add up.
    """

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient
        self._sums: list[tuple[int, Tensor]] = []

    def end_group(self) -> None:
        """Keep the gradient of the group that has ended; the next one begins at 0."""
        total = self._gradient.clone()
        level = 0
        while self._sums and self._sums[-1][0] == level:
            total = self._sums.pop()[1].add_(total)
            level += 1
        self._sums.append((level, total))
        self._gradient.zero_()

    def join(self) -> None:
        """Add the sums of all groups before to the gradient of the last one."""
        while self._sums:
            self._gradient.add_(self._sums.pop()[1])

    def drop(self) -> None:
        """Forget the groups that have ended."""
        self._sums.clear()
