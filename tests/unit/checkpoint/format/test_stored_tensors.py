"""What a place holds against what a model has: every difference, one line for all layers alike."""

from shardwise.checkpoint.format.manifest import TensorEntry
from shardwise.checkpoint.format.stored_tensors import find_sources, mismatches

SHAPES = {
    "transformer.wte.weight": (8, 4),
    **{f"transformer.h.{layer}.ln_1.weight": (4,) for layer in range(4)},
    "transformer.empty": (0, 4),
}


def entry(*shape: int, dtype: str = "F32") -> TensorEntry:
    return TensorEntry(shape, dtype, ())


def entries() -> dict[str, TensorEntry]:
    """The tensors of a place that has all that a model needs."""
    return {name: entry(*shape) for name, shape in SHAPES.items() if 0 not in shape}


def test_every_difference_is_named() -> None:
    assert mismatches("PLACE", SHAPES, entries()) == []
    stored = entries() | {
        "extra": entry(2),
        "transformer.wte.weight": entry(9, 4),
        "transformer.h.3.ln_1.weight": entry(4, dtype="I8"),
    }
    for layer in (0, 1):
        del stored[f"transformer.h.{layer}.ln_1.weight"]
    assert mismatches("PLACE", SHAPES, stored) == [
        "PLACE lacks transformer.h.{0…1}.ln_1.weight [4]",
        "PLACE has extra [2], which the model lacks",
        "PLACE: shape of transformer.wte.weight [9, 4] must be [8, 4]",
        "PLACE: dtype of transformer.h.3.ln_1.weight (I8) must be float64, float32, float16 or bfloat16: quantized "
        "weights cannot be trained",
    ]


def test_an_optimizer_state_is_named_and_may_lack_what_is_not_trained() -> None:
    stored = {"transformer.wte.weight": entry(8, 3)}
    found = mismatches("PLACE", SHAPES, stored, needed=["transformer.h.2.ln_1.weight"], state="exp_avg")
    assert found == [
        "PLACE lacks the exp_avg of transformer.h.2.ln_1.weight [4]",
        "PLACE: shape of the exp_avg of transformer.wte.weight [8, 3] must be [8, 4]",
    ]


def test_the_canonical_spelling_is_read_first() -> None:
    bare = {name.removeprefix("transformer."): tensor for name, tensor in entries().items()}
    bare["lm_head.weight"] = bare["wte.weight"]
    sources, problems = find_sources("PLACE", "gpt", SHAPES, bare)
    assert problems == []
    assert sources["transformer.wte.weight"] == ["wte.weight", "lm_head.weight"]
    assert sources["transformer.h.2.ln_1.weight"] == ["h.2.ln_1.weight"]
