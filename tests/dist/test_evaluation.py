"""An evaluation counts every token once and is the same at any layout, however few samples there are."""

import functools
import itertools
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.config import Config, check_layout
from shardwise.data.formats.prepared_data import PreparedText, make_evaluation_batches
from shardwise.models.build import build_model
from shardwise.models.causal import CausalLM
from shardwise.pipeline.stages import build_stages
from shardwise.train.evaluation_losses import EvaluationLosses, evaluate
from tests.dist.dense import fill, mesh, run
from tests.dist.own_models import Dropping
from tests.dist.training import FAMILIES, cases, make_config, make_data, sizes
from tests.dist.training import MODELS as TRAINED
from tests.sweeps import few

LENGTH, VOCABULARY = 16, 131
BYTES = np.arange(VOCABULARY) % 7
"""Bytes of each id's text."""
SIZES = sizes(VOCABULARY, 32, 48, heads=4, positions=32)
MODELS: dict[str, dict[str, Any]] = {
    **{name: SIZES | family for name, family in FAMILIES.items()},
    "own": {"family": "tests.dist.own_models:Dropping", "vocab_size": VOCABULARY},
    **{name: SIZES | own for name, own in TRAINED["evaluated"].items()},
}
DEEP = {"num_hidden_layers": 4}
"""For as many stages."""
LAYOUTS = cases("evaluation")
PIPELINES = cases("evaluation in stages")


def config(
    model: str, tensor: int = 1, sequence: bool = False, micro_batch: int = 1, ranks: int = 1, **parallel: Any
) -> Config:
    return make_config(
        model=MODELS[model] if model == "own" or "pipeline" not in parallel else MODELS[model] | DEEP,
        parallel={"tensor": tensor, "sequence": sequence, **parallel},
        train={"sequence_length": LENGTH, "micro_batch": micro_batch, "global_batch": 8 * micro_batch * ranks},
    )


def data(chosen: Config, tokens: int) -> PreparedText:
    """Of which the evaluation part holds so many tokens; for BERT all sentences of some more."""
    pairs = "nsp" in chosen.model.objectives
    whole = make_data(VOCABULARY, samples=1 + tokens // LENGTH, length=LENGTH, pairs=pairs)
    if pairs:
        return whole
    return replace(whole, tokens={**whole.tokens, "eval": whole.tokens["train"][:tokens]})


def evaluated(chosen: Config, tokens: int) -> EvaluationLosses:
    ranks = mesh(chosen.parallel.tensor, chosen.parallel.pipeline)
    model = build_stages(chosen, check_layout(chosen, ranks.world.size), ranks, dtype=torch.float32)
    fill(model, scale=0.2)
    prepared = data(chosen, tokens)
    batches = make_evaluation_batches(chosen, prepared, "train" if prepared.pair_tokens else "eval")
    bytes_V = BYTES if chosen.model.causal else None
    return evaluate(model, batches, ranks, chosen.train.micro_batch, False, chosen.parallel, bytes_V)


@functools.cache
def alone(model: str, tokens: int) -> EvaluationLosses:
    return evaluated(config(model), tokens)


@pytest.mark.parametrize("tokens", [2, 18, 90])
@pytest.mark.parametrize("model", ["llama", "gpt", "gpt_neox", "dynamic", "longrope"])
def test_every_token_is_predicted_once(model: str, tokens: int) -> None:
    """Against losses that are summed window by window from the logits, where a partial window is not padded."""
    chosen = config(model)
    module = build_model(chosen, mesh(1).tp, sequence_parallel=False, dtype=torch.float32)
    fill(module, scale=0.2)
    assert isinstance(module, CausalLM)
    row = torch.from_numpy(np.asarray(data(chosen, tokens).tokens["eval"]).astype(np.int64))
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
    size = int(BYTES[row[1:].numpy()].sum())
    assert found.bytes == size
    assert found.bits_per_byte == pytest.approx(total / (np.log(2) * size), rel=1e-6)


class Measured(Dropping):
    """`lengths`: those that its forward was given, of each micro-batch."""

    lengths: ClassVar[list[list[int] | None]] = []

    def forward(self, ids_SB: Tensor, targets_SB: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        self.lengths.append(None if lengths_B is None else lengths_B.tolist())
        return super().forward(ids_SB, targets_SB)


def test_a_model_of_ones_own_is_given_the_lengths_that_it_names() -> None:
    chosen = config("own", micro_batch=2)
    batches = make_evaluation_batches(chosen, data(chosen, 43), "eval")
    evaluate(Measured(VOCABULARY), batches, mesh(1), 2)
    assert Measured.lengths == [None, [10, 0]]


OFTEN = (
    *(("llama", layout, 91) for layout in LAYOUTS),
    # A partial sequence lies in a micro-batch beside whole ones, or between ranks.
    *(("dynamic", layout, 23) for layout in ("micro-batch", "tp2-sp")),
    *((model, "tp2-dp2", 91) for model in ("gpt", "gpt_neox", "bert")),
    ("own", "dp4", 91),
)
"""All layouts of one model, and one layout of the others."""


@pytest.mark.parametrize(("model", "layout", "tokens"), few(itertools.product(MODELS, LAYOUTS, (2, 23, 91)), *OFTEN))
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
        assert (found.tokens, found.sequences, found.bytes) == (wanted.tokens, wanted.sequences, wanted.bytes), where
        assert found.accuracies == pytest.approx(wanted.accuracies), where
        for name, loss in wanted.losses.items():
            assert found.losses[name] == pytest.approx(loss, rel=1e-5), where


@functools.cache
def alone_and_deep(model: str, tokens: int, micro_batch: int) -> EvaluationLosses:
    return evaluated(config(model, micro_batch=micro_batch, pipeline=1), tokens)


@pytest.mark.parametrize(
    ("model", "layout"),
    few(itertools.product((*FAMILIES, "dynamic"), PIPELINES), ("bert", "zbv-dp2"), ("dynamic", "pp2-tp2-sp")),
)
def test_it_is_the_same_through_a_pipeline(model: str, layout: str, ranks: Any) -> None:
    """To the bit where nothing but the pipeline cuts the model; the last micro-batches fill no round of all stages."""
    world, tensor, sequence, micro_batch, parallel = PIPELINES[layout]
    tokens = 91 + 150 * (model == "bert")
    wanted = alone_and_deep(model, tokens, micro_batch)
    replicas = world // tensor // parallel["pipeline"]
    chosen = config(model, tensor, sequence, micro_batch, replicas, **parallel)
    for rank, found in enumerate(run(ranks, world, evaluated, chosen, tokens)):
        where = f"rank {rank} of {layout}"
        assert (found.counted, found.tokens) == (wanted.counted, wanted.tokens), where
        assert found.accuracies == wanted.accuracies, where
        assert found.losses == pytest.approx(wanted.losses, rel=1e-6 if tensor > 1 else 1e-14), where


def test_berts_accuracy_is_that_of_its_logits() -> None:
    chosen = config("bert")
    model = build_model(chosen, mesh(1).tp, sequence_parallel=False, dtype=torch.float32)
    fill(model, scale=0.2)
    batches = make_evaluation_batches(chosen, data(chosen, 241), "train")
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
