"""Sparse models on the strict device: losses and biases of routers as on the CPU."""

from typing import Any

import pytest

from tests.dist.test_experts import curve, go_on
from tests.rank_pool import Pools


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"parallel": {"expert": 2}, "optimizer": {"zero": 3}}, id="EP 2, ZeRO-3", marks=pytest.mark.slow),
        pytest.param({"parallel": {"tensor": 2, "sequence": True}}, id="TP 2 + SP", marks=pytest.mark.slow),
        pytest.param({"parallel": {"expert": 2, "context": 2}}, id="EP 2 of CP 2", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_the_cpu(sections: dict[str, Any], strict: Pools) -> None:
    for records in strict(2).run(go_on, sections, None, 4, None):
        assert [loss for loss, _ in records] == pytest.approx([loss for loss, _ in curve()], rel=1e-5)
        assert [experts.lines for _, experts in records] == [experts.lines for _, experts in curve()]
