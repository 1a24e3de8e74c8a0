"""Any layout, the same training: losses, gradients and initial weights against one process."""

import functools
from typing import Any

import pytest
import torch

from shardwise.testing import gradient_errors
from tests.dist.training import Outcome, make_config, train

LAYOUTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "tp2-sp": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "dp2-zero0": (2, {"optimizer": {"zero": 0}}),
    "dp2-zero1": (2, {"optimizer": {"zero": 1}}),
    "tp4": (4, {"parallel": {"tensor": 4}}),
    "tp4-sp": (4, {"parallel": {"tensor": 4, "sequence": True}}),
    "dp4-zero0": (4, {"optimizer": {"zero": 0}}),
    "dp4-zero1": (4, {"optimizer": {"zero": 1}}),
    "tp2-dp2-sp-zero1": (4, {"parallel": {"tensor": 2, "sequence": True}}),
    "tp2-dp2-zero0": (4, {"parallel": {"tensor": 2}, "optimizer": {"zero": 0}}),
    "accumulation4": (1, {"train": {"micro_batch": 2}}),
    "tp2-dp2-sp-zero1-accumulation4": (4, {"parallel": {"tensor": 2, "sequence": True}, "train": {"micro_batch": 1}}),
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "uneven": {},
    "tied-biased": {"model": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}},
}


APART = {"tp4-sp": "tied-biased", "dp4-zero0": "uneven", "tp2-dp2-sp-zero1": "tied-biased", "dp2-zero1": "uneven"}
OFTEN = {(layout, APART.get(layout, "plain")) for layout in LAYOUTS}
"""What every run of the tests has: each layout, each variant at several; the others are slow."""
CELLS = [
    pytest.param(layout, variant, marks=() if (layout, variant) in OFTEN else pytest.mark.slow)
    for layout in LAYOUTS
    for variant in VARIANTS
]


@functools.cache
def reference(variant: str) -> Outcome:
    torch.set_num_threads(1)
    return train(make_config(**{"train": {"micro_batch": 8}, **VARIANTS[variant]}), uneven=variant == "uneven")


@pytest.mark.parametrize(("layout", "variant"), CELLS)
def test_layout_trains_like_one_process(layout: str, variant: str, ranks: Any) -> None:
    world, sections = LAYOUTS[layout]
    config = make_config(**sections, **VARIANTS[variant])
    outcomes = ranks(world).run(train, config, 20, variant == "uneven")
    found, wanted = outcomes[0], reference(variant)
    for name, weight in wanted.weights.items():
        assert torch.equal(found.weights[name], weight), f"{name} differs at step 0"
    errors = gradient_errors(found.gradients, wanted.gradients)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= 1e-5, f"gradient of {worst} is off by {errors[worst]:.2e} of its norm"
    for step, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True), start=1):
        assert abs(a - b) <= 1e-5 * abs(b), f"step {step}: loss {a!r}, one process has {b!r}"
    for step, (a, b) in enumerate(zip(found.norms, wanted.norms, strict=True), start=1):
        assert abs(a - b) <= 1e-4 * abs(b), f"step {step}: gradient norm {a!r}, one process has {b!r}"
    assert abs(found.evaluation[0] - wanted.evaluation[0]) <= 1e-5 * wanted.evaluation[0]
    assert wanted.losses[-1] < 0.99 * wanted.losses[0], "the reference does not learn, so the curve shows nothing"
