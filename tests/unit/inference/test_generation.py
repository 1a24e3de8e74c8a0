"""A model of the user's own, which has no cache. At every layout: tests/dist/test_generation.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.inference.generation import _Uncached


class Places:
    """Its logits say at which place they were made."""

    def logits(self, ids_SB: Tensor) -> Tensor:
        return torch.arange(len(ids_SB)).view(-1, 1, 1).expand(-1, 1, 5)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_the_text_goes_on_after_its_last_token(length: int) -> None:
    """And not after what fills it up, so that sequence parallelism can cut it evenly."""
    mesh: Any = SimpleNamespace(tp=SimpleNamespace(size=4), device=torch.device("cpu"))
    assert _Uncached(Places(), mesh).next_logits(list(range(length))).tolist() == [float(length - 1)] * 5
