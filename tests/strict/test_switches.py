"""`train.switches` on a device with streams, and passes that are replayed from the operations of one of them."""

from typing import Any

import pytest

from tests.dist import switches
from tests.rank_pool import Pools

MODES: list[dict[str, Any]] = [{}, {"precision": {"mode": "mixed"}}]


@pytest.mark.parametrize("sections", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.slow)])
def test_replayed_passes_have_the_bits_of_others(strict: Pools, sections: dict[str, Any]) -> None:
    """A host that read a number, or a tensor that is not an input of the graph, would show."""
    ((is_equal, replays),) = strict(1).run(switches.captured, sections)
    assert is_equal
    assert replays == 6, "three steps of four micro-batches, without the last of each and three calls before"


@pytest.mark.slow
@pytest.mark.parametrize("sections", MODES)
def test_updates_beside_the_backward_pass_have_the_same_bits(strict: Pools, sections: dict[str, Any]) -> None:
    for is_equal, updated in strict(2).run(switches.both, sections, "update_in_backward"):
        assert is_equal
        assert updated > switches.STEPS
