"""What the miniature keeps of a recipe, and where it can be trained."""

import math

import pytest

from shardwise.config import Config, check_layout, config_from_sections, load_config, recipe_names
from shardwise.verify.layouts import Cell, layouts_to_verify, parse_layouts
from shardwise.verify.miniature import miniature, miniature_at_cell, trainable_cells
from shardwise.verify.tolerance import LayoutDifferences, Tolerance
from tests.sweeps import few

DEGREES = (1, 2, 4, 8)


def small(recipe: Config, ranks: int = 8, steps: int = 4) -> tuple[Config, list[Cell]]:
    cells = layouts_to_verify(recipe, "cpu", ranks, parse_layouts(["all"]))
    return miniature(recipe, cells, steps, has_accelerator=False), cells


OFTEN = ("bert-tiny", "gpt-neox-20b", "gpt2-xl", "llama2-70b", "mixtral-8x7b", "quickstart", "smollm3-3b")
"""Few and many heads, odd numbers of them, experts, and several optimizers; the others are slow."""


@pytest.mark.parametrize("name", few(recipe_names(), *OFTEN))
def test_it_keeps_what_decides_how_a_recipe_is_cut_and_computed(name: str) -> None:
    recipe = load_config(name)
    config, cells = small(recipe)
    model, own = config.model, recipe.model
    kept = ("family", "tie_word_embeddings", "initializer_range", "hidden_dropout_p", "attention_dropout_p",
            "embedding_dropout_p", "ffn_dropout_p", "activation", "norm_eps")  # fmt: skip
    assert {key: getattr(model, key) for key in kept} == {key: getattr(own, key) for key in kept}
    ratios = [each.num_attention_heads / each.num_key_value_heads for each in (model, own)]
    assert ratios[0] == ratios[1]
    # Key/value heads are cut over ranks, or copied to several.
    kv_heads = [each.num_key_value_heads for each in (model, own)]
    fits = [[count % degree == 0 or degree % count == 0 for degree in DEGREES] for count in kv_heads]
    assert fits[0] == fits[1]
    for key in ("vocab_size", "num_attention_heads", "intermediate_size"):
        fits = [[getattr(each, key) % degree == 0 for degree in DEGREES] for each in (model, own)]
        assert fits[0] == fits[1], f"{key} can be cut otherwise than the recipe's"
    for key in ("name", "schedule", "weight_decay", "betas", "eps", "max_norm"):
        assert getattr(config.optimizer, key) == getattr(recipe.optimizer, key)
    assert config.precision.resolved(accelerator=False) == recipe.precision.resolved(accelerator=False)
    assert config.parallel.vocab_multiple == recipe.parallel.vocab_multiple
    assert (config.train.dropout_mode == "invariant") == own.has_dropout
    assert model.hidden_size <= max(256, 8 * own.num_attention_heads)
    found, refused = trainable_cells(config, cells)
    fitting = [
        cell for cell in cells if own.num_attention_heads % cell.tensor == 0 and (own.causal or cell.context == 1)
    ]
    assert found == fitting, "the layouts that exist are those whose tensor-parallel degree divides the heads"
    assert bool(refused) == (len(found) < len(cells))


def test_cells_of_plain_models_recipes_bits_and_fp8() -> None:
    """Its class takes no `group`: it is not broken at TP 2, it cannot be cut."""
    sizes = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = {"family": "examples.own_model.plain:Decoder", "num_attention_heads": 4, **sizes}
    values = {"train": {"steps": 1, "global_batch": 4, "sequence_length": 16}, "optimizer": {"lr": 1e-3}}
    config, cells = small(config_from_sections({"model": model, **values}), ranks=4)
    kept, reasons = trainable_cells(config, cells)
    assert {(cell.tensor, cell.pipeline, cell.data) for cell in kept} == {(1, 1, 4)}
    assert {cell.zero for cell in kept} >= {0, 1}
    assert [reason for reason in reasons if reason.startswith("parallel.tensor")] == [
        "parallel.tensor must be 1: examples.own_model.plain:Decoder takes no argument group, so it is not made of "
        "sharded layers, and only data parallelism and ZeRO can be verified"
    ]
    config, cells = small(load_config("llama2-7b", ["parallel.replicate=2"]))
    for cell in cells:
        here = miniature_at_cell(config, cell)
        layout = check_layout(here, cell.ranks)
        assert (layout.tensor, layout.pipeline, layout.data) == (cell.tensor, cell.pipeline, cell.data)
        assert layout.accumulation(here.train) >= 2, "accumulation is part of what is verified"
        assert (here.optimizer.zero, here.train.recompute) == (cell.zero, cell.recompute)
        assert here.train.global_batch == config.train.global_batch
        assert here.parallel.replicate == (2 if cell.data * cell.context % 2 == 0 else 1)
    recipe = load_config("bert-tiny")
    cells = layouts_to_verify(recipe, "cpu", 8, parse_layouts(["all"]))
    cells = [cell for cell in cells if cell.tensor < 8 and cell.context == 1]
    bits = miniature(recipe, cells, 4, has_accelerator=False, bitwise=True)
    kept, reasons = trainable_cells(bits, cells)
    assert (len(kept), reasons) == (len(cells), [])
    assert {miniature_at_cell(bits, cell).train.micro_batch for cell in (*cells, Cell())} == {2}
    recipe = load_config("gpt-neox-tiny", ["precision.mode=null", "precision.matmul=fp8"])
    config, cells = small(recipe)
    assert config.precision.resolved(accelerator=False) == recipe.precision.resolved(accelerator=False)
    plain, _ = trainable_cells(*small(load_config("gpt-neox-tiny")))
    found, _ = trainable_cells(config, cells)
    assert found == [cell for cell in plain if 16 * cell.context <= recipe.model.max_position_embeddings]
    assert {miniature_at_cell(config, cell).train.micro_batch for cell in cells} == {1}, (
        "scales are those of a micro-batch"
    )


def test_steps_move_the_weights_and_differences_beyond_the_tolerance_of_dtypes_are_problems() -> None:
    """A warmup of thousands of steps would leave a rate of about 0, with which every layout agrees."""
    config, _ = small(load_config("llama2-7b"))
    assert (config.optimizer.warmup_steps, config.optimizer.lr) == (1, 1e-3)
    assert small(load_config("llama2-7b", ["optimizer.name=lamb"]))[0].optimizer.lr == 1e-2

    def tolerance(*overrides: str) -> Tolerance:
        return Tolerance.of(miniature(load_config("llama2-tiny", overrides), [Cell()], 2, has_accelerator=False))

    assert tolerance() == Tolerance(1e-5, 1e-5)
    assert tolerance("precision.mode=mixed") == Tolerance(2**-10, 2**-5)
    assert tolerance("precision.mode=mixed", "precision.reduce=bfloat16") == Tolerance(2**-10, 2**-2)
    assert tolerance("precision.mode=bfloat16") == Tolerance(2**-10, 2**-2)
    assert tolerance("precision.mode=float32", "precision.matmul=fp8") == Tolerance(2**-10, 2**-2)
    allowed = Tolerance(1e-5, 1e-4)
    assert LayoutDifferences(0.0, 1e-5, 1e-4, 1e-5).problems(allowed, "A") == []
    assert LayoutDifferences(1e-9, 2e-5, 2e-4, 3e-5, "w", "g").problems(allowed, "A") == [
        "the initial w differs by 1.0e-09, and must be equal",
        "the gradient of g differs by 2.0e-04 of its norm",
        "the losses differ by 2.0e-05",
        "after the checkpoint of A was read the losses differ by 3.0e-05",
    ]
    assert len(LayoutDifferences(math.nan, *[math.nan] * 3).problems(allowed, "A")) == 4
