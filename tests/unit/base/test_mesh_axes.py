"""The one notation of a layout, wherever it is shown."""

import pytest

from shardwise.base.mesh_axes import layout_text
from shardwise.config import Layout
from shardwise.verify.layouts import Cell
from shardwise_plan.layout_choices import LayoutChoice


@pytest.mark.parametrize(
    ("tensor", "context", "pipeline", "data", "sequence", "text", "short"),
    [
        (2, 1, 2, 2, True, "TP 2 + SP × PP 2 × DP 2", "TP 2 + SP × PP 2 × DP 2"),
        (2, 1, 1, 1, False, "TP 2 × PP 1 × DP 1", "TP 2"),
        (1, 1, 1, 4, True, "TP 1 × PP 1 × DP 4", "DP 4"),
        (1, 2, 1, 2, False, "TP 1 × CP 2 × PP 1 × DP 2", "CP 2 × DP 2"),
        (1, 1, 1, 1, False, "TP 1 × PP 1 × DP 1", ""),
    ],
)
def test_a_layout_has_one_notation(
    tensor: int, context: int, pipeline: int, data: int, sequence: bool, text: str, short: str
) -> None:
    degrees = {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data}
    world = tensor * context * pipeline * data
    assert layout_text(degrees, sequence=sequence) == text
    assert layout_text(degrees, sequence=sequence, ones=False) == short
    assert Layout(world, tensor, sequence, pipeline, context=context).product().startswith(f"{text} = {world} rank")
    choice = LayoutChoice(tensor, sequence, context, pipeline, "1f1b", None, 1, "none", 1)
    assert choice.text(world).startswith(text)
    assert Cell("cpu", world, tensor, sequence, context, pipeline=pipeline).degrees == (short or "one process")
