"""Documents within a sample see nothing of each other, and their masks are in the memory estimate."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from shardwise.config import Config, check_layout
from shardwise.config.hugging_face import read_hugging_face
from shardwise.data.samples.causal import DocumentEnds, causal_batch
from shardwise.data.samples.packing import PackedBatches, PackedSamples
from shardwise.distributed.placement import placements
from shardwise.estimates.memory import expected_memory
from shardwise.layers.dropout import DropoutKey
from shardwise.models.build import build_model
from tests import hugging_face
from tests.dist.test_memory import DROPOUT, RECOMPUTE, SIZES, measure_step
from tests.dist.training import FAMILIES, make_config
from tests.sweeps import few

END = 3
CAUSAL = ("llama", "gpt", "gpt_neox")
# Step by step, with a mask that drops nothing: as near to none as a probability comes.
NEARLY_NONE: dict[str, dict[str, float]] = {
    "llama": {"attention_dropout": 1e-9},
    "gpt": {"attn_pdrop": 1e-9},
    "gpt_neox": {"attention_dropout": 1e-9},
}


def model_of(config: Config) -> Any:
    return build_model(config, None, sequence_parallel=False, dtype=torch.float32).eval()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "step by step"])
@pytest.mark.parametrize("family", CAUSAL)
def test_a_document_in_a_sample_is_a_document_alone(family: str, fused: bool) -> None:
    sizes = {"vocab_size": 23, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    own = FAMILIES[family] | no_dropout(family) | ({} if fused else NEARLY_NONE[family])
    config = make_config(model=sizes | {"num_attention_heads": 4, "initializer_range": 0.2} | own)
    model = model_of(config)
    generator = np.random.default_rng(0)
    rows = generator.integers(END + 1, 23, (2, 17))
    ends = ((6, 7), (0, 11, 15))
    for row, places in zip(rows, ends, strict=True):
        row[list(places)] = END
    resets = DocumentEnds(END, reset_position_ids=True, reset_attention_mask=True)
    batch = causal_batch(rows, np.full(2, 16), np.arange(2), resets)
    key = None if fused else DropoutKey(1, 1, torch.arange(2), 0, "invariant")
    inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
    together = model(**inputs, dropout=key).item()
    alone = 0.0
    for row, places in zip(rows, ends, strict=True):
        cuts = [0, *(place + 1 for place in places), 16]
        for begin, end in pairwise(cuts):
            if begin < end:
                ids, targets = (
                    torch.from_numpy(part[:, None].copy()) for part in (row[begin:end], row[begin + 1 : end + 1])
                )
                alone += model(ids, targets).item()
    assert together == pytest.approx(alone, rel=1e-6)
    without = {name: inputs[name] for name in ("ids_SB", "targets_SB")}
    assert model(**without).item() != pytest.approx(alone, rel=1e-4), "the documents do not change the loss at all"


def test_the_loss_of_a_packed_sample_is_that_of_transformers(tmp_path: Path) -> None:
    """There, a mask of blocks keeps documents apart, and each has its own positions."""
    theirs = hugging_face.save("llama", tmp_path)
    ours = model_of(make_config(model=read_hugging_face(tmp_path)))
    weights = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for _, parameter, record in placements(ours):
            for piece in record.pieces:
                piece.of(parameter).copy_(weights[piece.name][piece.box.slices])
    lengths = [8, 3, 12, 31, 1, 5]  # two samples of 24, one has padding; one document is longer
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    row = np.random.default_rng(0).integers(0, hugging_face.VOCABULARY, bounds[-1], dtype=np.int32)
    batches = PackedBatches(row, PackedSamples.from_bounds(bounds, 24), seed=1)
    batch = batches.global_batch(0, batches.num_samples)
    inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
    starts_BS = inputs["starts_SB"].T
    keys_S = torch.arange(24)
    sees_BSS = (keys_S <= keys_S[:, None]) & (keys_S >= starts_BS[:, :, None])
    mask_B1SS = torch.where(sees_BSS, 0.0, -torch.inf)[:, None]
    with torch.no_grad():
        logits = theirs(
            inputs["ids_SB"].T, attention_mask=mask_B1SS, position_ids=inputs["positions_SB"].T, use_cache=False
        ).logits
        wanted = cross_entropy(logits.flatten(0, 1), inputs["targets_SB"].T.flatten(), reduction="sum").item()
        loss = ours(**inputs).item()
    assert int(batch.counts[0]) == sum(lengths) - len(lengths)
    assert loss == pytest.approx(wanted, rel=1e-6)


def no_dropout(family: str) -> dict[str, float]:
    return dict.fromkeys(DROPOUT[family], 0.0)


@pytest.mark.parametrize("family", few(["llama", "gpt", "gpt_neox"], "llama"))
def test_the_masks_are_in_the_memory_estimate(family: str) -> None:
    for recompute in RECOMPUTE:
        config = make_config(
            model=SIZES | FAMILIES[family] | no_dropout(family),
            train={"recompute": recompute, "sequence_length": 128, "micro_batch": 2, "global_batch": 2},
            data={"reset_position_ids": True, "reset_attention_mask": True, "eod_token": END},
        )
        memory = expected_memory(config, check_layout(config, 1))
        found = measure_step(config)
        off = memory.total / found - 1
        assert abs(off) <= 0.04, f"{recompute}: held {found:,}, cost has {memory.total:,} ({off:+.1%})"
