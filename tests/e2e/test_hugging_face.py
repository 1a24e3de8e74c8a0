"""The end of a run: weights that `transformers` loads as they are, and that are the model we trained."""

import json
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.config import Config
from shardwise.data import PreparedData, TokenBatches, prepare
from tests.e2e.command import environment, metrics
from tests.e2e.conftest import Trained


def weights(trained: Trained) -> Path:
    return trained.run / "checkpoints/step-00000004"


def prepared(config: Config) -> PreparedData:
    return prepare(config, Path(environment()["SHARDWISE_CACHE"]))


def evaluation_loss(folder: Path, config: Config) -> float:
    """Of a Hugging Face folder on the held-out batches, by nothing but transformers and the data."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    data = prepared(config)
    train = config.train
    batches = TokenBatches(data.eval_tokens, train.sequence_length, train.seed)
    total, counted = 0.0, 0
    with torch.no_grad():
        for batch in batches.eval_batches(train.eval_batches, train.global_batch, 0, 1, train.micro_batch):
            inputs, targets = batch.inputs["ids_SB"], batch.inputs["targets_SB"]
            logits = model(torch.from_numpy(inputs.T.copy())).logits
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), torch.from_numpy(targets.T.copy()).flatten(), reduction="sum"
            )
            total += float(losses)
            counted += int(batch.counts[0])
    return total / counted


def test_transformers_gets_our_evaluation_loss(trained: Trained) -> None:
    ours = metrics(trained.run, "eval")[-1]["loss"]
    theirs = evaluation_loss(weights(trained), trained.config)
    assert abs(theirs - ours) <= 1e-5 * ours, (
        f"transformers computes {theirs!r} from the final weights, the run ended at {ours!r}"
    )
    assert ours < math.log(301), "the model did not learn, so equal losses show little"


def test_the_tokenizer_comes_along(trained: Trained) -> None:
    tokenizer = AutoTokenizer.from_pretrained(weights(trained))
    text = "In spring there lived a monk – naïve, 修道士."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 301
    prompt = prepared(trained.config).eval_tokens[:16].tolist()
    sample = json.loads((trained.run / "results.json").read_text())["sample"]
    assert sample.startswith(tokenizer.decode(prompt)), "the sample does not continue the held-out text"
    assert len(sample) > len(tokenizer.decode(prompt))


def test_generate_works(trained: Trained) -> None:
    model = AutoModelForCausalLM.from_pretrained(weights(trained))
    ids = torch.tensor([[1, 2, 3]])
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 6)
