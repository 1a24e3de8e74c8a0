"""What is computed and gathered again, by the memory of a rank."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import Config, Layout, check_layout, load_config
from shardwise.estimates.memory import expected_memory
from shardwise.estimates.memory_choice import fitted_to_memory, memory_choice_text
from tests.unit.estimates.families import OWN

TP8 = Layout(8, tensor=8, sequence_parallel=True)
ORDER = (("none", False), ("none", True), ("selective", True), ("full", False))


def llama(*overrides: str) -> Config:
    return load_config("llama2-7b", ["parallel.tensor=8", "parallel.sequence=true", *overrides])


def total(config: Config, layout: Layout = TP8) -> int:
    memory = expected_memory(config, layout, True)
    return memory.total


def fit(config: Config, memory: float | None, layout: Layout = TP8) -> Config:
    return fitted_to_memory(config, layout, memory, accelerator=True, device="a device")


def chosen(memory: float | None, *overrides: str) -> tuple[str, bool]:
    config = fit(llama(*overrides), memory)
    return config.recompute, config.regathers


def test_the_first_choice_that_fits_is_taken() -> None:
    needed = []
    for recompute, regathers in ORDER:
        given = (f"train.recompute={recompute}", f"parallel.sequence_regather={str(regathers).lower()}")
        needed.append(total(llama(*given)))
        assert chosen(None, *given) == (recompute, regathers), "nothing is left open"
    assert needed == sorted(needed, reverse=True), "each choice needs less than the one before"
    for choice, bytes_needed in zip(ORDER, needed, strict=True):
        assert chosen(bytes_needed, "train.recompute=auto") == choice
    assert chosen(1, "train.recompute=auto") in (ORDER[-1], ("full", True)), "where none fits, the least"


def test_inputs_are_gathered_again_only_if_memory_asks() -> None:
    needed = total(llama("train.recompute=none", "parallel.sequence_regather=false"))
    assert chosen(needed, "train.recompute=none") == ("none", False)
    assert chosen(needed - 1, "train.recompute=none") == ("none", True)
    assert chosen(needed - 1, "train.recompute=none", "parallel.sequence_regather=false") == ("none", False)
    assert chosen(needed - 1, "train.recompute=none", "compile.enabled=true") == ("none", False)
    assert chosen(1, "train.recompute=none", "precision.matmul=fp8") == ("none", False)
    assert chosen(None, "train.recompute=none") == ("none", False)


def test_choices_are_named_and_what_is_not_known_is_refused() -> None:
    config = llama("train.recompute=auto")
    assert memory_choice_text(fit(config, 1e15), config) == "train.recompute=none"
    assert (memory_choice_text(fit(config, 1), config) or "").startswith("train.recompute=full")
    assert memory_choice_text(config, config) is None
    with pytest.raises(ConfigError, match="must be none, selective or full on a device, whose memory is not known"):
        chosen(None, "train.recompute=auto")
    own = OWN.with_keys(train={"recompute": "auto"})
    with pytest.raises(ConfigError, match="must be none, selective or full for a model of your own"):
        fit(own, 1e9, check_layout(own, 1))


def test_keys_come_in_a_ring_only_if_memory_asks() -> None:
    layout = Layout(16, tensor=1, context=16)
    long = ("train.sequence_length=262144", "model.max_position_embeddings=262144", "train.global_batch=16")
    keys = ("parallel.tensor=1", "parallel.sequence=false", "parallel.context=16", "train.recompute=full", *long)

    def passes_keys(memory: float | None, *overrides: str) -> bool:
        return fit(load_config("llama2-7b", [*keys, *overrides]), memory, layout).passes_keys

    needed = total(load_config("llama2-7b", keys), layout)
    assert not passes_keys(needed)
    assert passes_keys(needed - 1)
    assert not passes_keys(needed - 1, "parallel.context_keys=gather")
    assert not passes_keys(needed - 1, "compile.enabled=true")
    assert not passes_keys(None)
    config = load_config("llama2-7b", keys)
    assert memory_choice_text(fit(config, 1, layout), config) == "parallel.context_keys=ring"
