"""What a place holds against what a model has. Every difference of a model: tests/unit/checkpoint/test_load.py."""

from shardwise.checkpoint.format.manifest import TensorEntry
from shardwise.checkpoint.format.stored_tensors import find_sources, tensor_mismatches

SHAPES = {
    "transformer.wte.weight": (8, 4),
    **{f"transformer.h.{layer}.ln_1.weight": (4,) for layer in range(4)},
    "transformer.empty": (0, 4),
}


def entry(*shape: int) -> TensorEntry:
    return TensorEntry(shape, "F32", ())


def test_what_a_place_lacks_and_the_spelling_that_is_read_first() -> None:
    stored = {"transformer.wte.weight": entry(8, 3)}
    found = tensor_mismatches("PLACE", SHAPES, stored, needed=["transformer.h.2.ln_1.weight"], state="exp_avg")
    assert found == [
        "PLACE lacks the exp_avg of transformer.h.2.ln_1.weight [4]",
        "PLACE: shape of the exp_avg of transformer.wte.weight [8, 3] must be [8, 4]",
    ]
    # Of a place that has all that a model needs, without the prefix and with the tied head.
    bare = {name.removeprefix("transformer."): entry(*shape) for name, shape in SHAPES.items() if 0 not in shape}
    bare["lm_head.weight"] = bare["wte.weight"]
    sources, problems = find_sources("PLACE", "gpt", SHAPES, bare)
    assert problems == []
    assert sources["transformer.wte.weight"] == ["wte.weight", "lm_head.weight"]
    assert sources["transformer.h.2.ln_1.weight"] == ["h.2.ln_1.weight"]
