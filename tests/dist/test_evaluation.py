"""An evaluation counts every token once and is the same at any layout, however few samples there are."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shardwise.config import Config
from shardwise.data import PreparedData, make_evaluation
from shardwise.inference import Evaluation, evaluate
from shardwise.models import CausalLM, build_model
from tests.dist.dense import fill, mesh, run
from tests.dist.training import FAMILIES, make_config, make_data

LENGTH, VOCABULARY = 16, 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    **{name: SIZES | family for name, family in FAMILIES.items()},
    "own": {"family": "tests.dist.own_models:Dropping", "vocab_size": VOCABULARY},
}
# (ranks, TP, SP, micro-batch)
LAYOUTS = {
    "micro-batch": (1, 1, False, 5),
    "tp2": (2, 2, False, 1),
    "tp2-sp": (2, 2, True, 3),
    "dp2": (2, 1, False, 2),
    "tp4-sp": (4, 4, True, 2),
    "tp2-dp2": (4, 2, False, 1),
    "dp4": (4, 1, False, 3),
}


def config(model: str, tensor: int = 1, sequence: bool = False, micro_batch: int = 1, ranks: int = 1) -> Config:
    return make_config(
        model=MODELS[model],
        parallel={"tensor": tensor, "sequence": sequence},
        train={"sequence_length": LENGTH, "micro_batch": micro_batch, "global_batch": micro_batch * ranks},
    )


def data(chosen: Config, tokens: int) -> PreparedData:
    """Of which the evaluation part holds so many tokens; for BERT all sentences of some more."""
    pairs = "nsp" in chosen.model.objectives
    whole = make_data(VOCABULARY, samples=1 + tokens // LENGTH, length=LENGTH, pairs=pairs)
    if pairs:
        return whole
    return replace(whole, eval_tokens=whole.train_tokens[:tokens])


def evaluated(chosen: Config, tokens: int) -> Evaluation:
    ranks = mesh(chosen.parallel.tensor)
    sequence = chosen.parallel.sequence and ranks.tp.size > 1
    model = build_model(chosen, ranks.tp, sequence_parallel=sequence, dtype=torch.float32)
    fill(model, scale=0.2)
    prepared = data(chosen, tokens)
    batches = make_evaluation(chosen, prepared, "train" if prepared.pair_tokens else "eval")
    assert batches is not None
    return evaluate(model, batches, ranks, chosen.train.micro_batch)


def _alone(model: str, tokens: int) -> Evaluation:
    return evaluated(config(model), tokens)


alone = functools.cache(_alone)


@pytest.mark.parametrize("tokens", [2, 17, 18, 90])
@pytest.mark.parametrize("model", ["llama", "gpt", "gpt_neox"])
def test_every_token_is_predicted_once(model: str, tokens: int) -> None:
    """Against losses that are summed window by window from the logits: each target, in its own window's context."""
    chosen = config(model)
    module = build_model(chosen, mesh(1).tp, sequence_parallel=False, dtype=torch.float32)
    fill(module, scale=0.2)
    assert isinstance(module, CausalLM)
    row = torch.from_numpy(np.asarray(data(chosen, tokens).eval_tokens).astype(np.int64))
    total, counted = 0.0, 0
    for start in range(0, tokens - 1, LENGTH):
        window = row[start : start + LENGTH + 1]
        with torch.no_grad():
            logits = module.eval().logits(window[:-1].unsqueeze(1))[:, 0].double()
        total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
        counted += len(window) - 1
    found = alone(model, tokens)
    assert counted == tokens - 1 == found.counted["lm"] == found.tokens
    assert found.loss == pytest.approx(total / counted, rel=1e-6)
    assert found.perplexity == pytest.approx(np.exp(total / counted), rel=1e-5)
    assert not found.accuracies


TOKENS = {"1-target": 2, "2-samples": 23, "6-samples": 91}
CELLS = [
    pytest.param(
        model,
        layout,
        tokens,
        id=f"{model}-{layout}-{name}",
        # Every run of the tests has all layouts and all sizes of one model, and one layout of the others.
        marks=() if model == "llama" or (layout, name) == ("tp2-dp2", "6-samples") else pytest.mark.slow,
    )
    for model in MODELS
    for layout in LAYOUTS
    for name, tokens in TOKENS.items()
]


@pytest.mark.parametrize(("model", "layout", "tokens"), CELLS)
def test_it_is_the_same_at_any_layout(model: str, layout: str, tokens: int, ranks: Any) -> None:
    """Also where most ranks have no sample of their own."""
    world, tensor, sequence, micro_batch = LAYOUTS[layout]
    if model == "own" and tensor > 1:
        pytest.skip("the class takes no group")
    tokens = tokens + 150 if model == "bert" else tokens  # at least a few documents
    wanted = alone(model, tokens)
    chosen = config(model, tensor, sequence, micro_batch, world // tensor)
    for rank, found in enumerate(run(ranks, world, evaluated, chosen, tokens)):
        where = f"rank {rank} of {layout}"
        assert found.counted == wanted.counted, where
        assert (found.tokens, found.sequences) == (wanted.tokens, wanted.sequences), where
        assert found.accuracies == pytest.approx(wanted.accuracies), where
        for name, loss in wanted.losses.items():
            assert found.losses[name] == pytest.approx(loss, rel=1e-5), where


def test_berts_accuracy_is_that_of_its_logits() -> None:
    chosen = config("bert")
    model = build_model(chosen, mesh(1).tp, sequence_parallel=False, dtype=torch.float32)
    fill(model, scale=0.2)
    batches = make_evaluation(chosen, data(chosen, 241), "train")
    assert batches is not None
    right = {"mlm": 0, "nsp": 0}
    for batch in batches.eval_batches(batches.num_samples, 1, 0, 1, 1):
        inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
        with torch.no_grad():
            words, pairs = model.logits(inputs["ids_SB"], inputs["token_types_SB"], inputs["mask_SB"])
        chosen_P = words[inputs["positions_PB"][:, 0], 0].argmax(dim=-1)
        right["mlm"] += int((chosen_P == inputs["targets_PB"][:, 0]).sum())
        right["nsp"] += int((pairs.argmax(dim=-1) == inputs["next_sentence_B"]).sum())
    found = alone("bert", 241)
    assert found.accuracies == {name: right[name] / found.counted[name] for name in right}
    assert found.perplexity is None
    assert found.counted["nsp"] == found.sequences
