import itertools
from typing import Any

import pytest

from shardwise.config import Config, config_from
from shardwise.config.composition import CHOICES, HOLES, chosen
from shardwise.errors import ConfigError

CELLS = [dict(zip(CHOICES, cell, strict=True)) for cell in itertools.product(*CHOICES.values())]
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4,
}  # fmt: skip


def config_of(cell: dict[str, str]) -> Config:
    own = cell["model"] == "own"
    dropout = 0.0 if cell["dropout"] == "none" else 0.1
    model = (
        {"family": "some.module:Model", "vocab_size": 32}
        if own
        else SIZES
        | {"family": "gpt", "tie_word_embeddings": cell["tying"] == "tied"}
        | dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), dropout)
    )
    parallel = {} if cell["schedule"] == "none" else {"pipeline": 2, "schedule": cell["schedule"]}
    train = {"steps": 1, "global_batch": 8, "sequence_length": 8, "recompute": cell["recompute"]}
    if cell["dropout"] != "none":
        train["dropout_mode"] = cell["dropout"]
    return config_from({"model": model, "parallel": parallel, "train": train, "optimizer": {"lr": 1e-3}})


def possible(cell: dict[str, str]) -> bool:
    """Tying and dropout of an own model are its own."""
    return cell["model"] == "family" or (cell["tying"], cell["dropout"]) == ("untied", "none")


@pytest.mark.parametrize("cell", list(filter(possible, CELLS)), ids=lambda cell: "-".join(cell.values()))
def test_a_hole_is_refused_with_its_reason_and_nothing_else_is(cell: dict[str, str]) -> None:
    config = config_of(cell)
    assert chosen(config) == cell, "the cell is another than the one that is tested"
    reasons = [hole.reason for hole in HOLES if hole.has(cell)]
    if not reasons:
        config.check(2)
        return
    with pytest.raises(ConfigError) as caught:
        config.check(2)
    assert [problem.rpartition(": ")[2] for problem in caught.value.problems] == reasons


def test_a_refusal_names_key_value_and_fix() -> None:
    cell = {"model": "own", "schedule": "1f1b", "recompute": "none", "tying": "untied", "dropout": "none"}
    with pytest.raises(ConfigError) as caught:
        config_of(cell).check(2)
    assert str(caught.value) == (
        "parallel.pipeline (2) must be 1 with a model of your own (model.family some.module:Model): "
        "nothing is known of how to cut it into stages"
    )


def test_the_choices_of_a_hole_are_there() -> None:
    for hole in HOLES:
        assert all(set(choices) <= set(CHOICES[key]) for key, choices in hole.of.items()), hole
