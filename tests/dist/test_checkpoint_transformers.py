"""`transformers` opens a checkpoint as it is and computes what we do: every family, every layout that wrote it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.checkpoints import load, make_trainer, run, step_folder
from tests.dist.dense import run as on_ranks
from tests.dist.test_checkpoint import config_of
from tests.dist.training import FACTS, FAMILIES, sizes

SIZES = sizes(positions=32, spread=0.2)
LAYOUTS = {
    "one process": (1, 1, False, 1, 1),
    "TP 2 + SP": (2, 2, True, 1, 1),
    "DP 2, ZeRO-0": (2, 1, False, 0, 1),
    "TP 2 + SP × DP 2": (4, 2, True, 1, 1),
    "TP 4": (4, 4, False, 1, 1),
    "TP 2 × PP 2": (4, 2, True, 1, 2),
}


def _is_quick(family: str, layout: str) -> bool:
    if layout == "TP 2 × PP 2":
        return family == "gpt"  # tied: both ends of the pipeline have the embedding
    return layout == "TP 2 + SP × DP 2" and family == "llama"


CELLS = [
    pytest.param(family, layout, marks=() if _is_quick(family, layout) else pytest.mark.slow)
    for family in FAMILIES
    for layout in LAYOUTS
] + [
    pytest.param("mistral", "DP 2, ZeRO-0", marks=pytest.mark.slow),
    pytest.param("qwen2", "TP 4", marks=pytest.mark.slow),
    pytest.param("qwen3", "TP 4", marks=pytest.mark.slow),
    pytest.param("olmo2", "TP 4", marks=pytest.mark.slow),
    pytest.param("olmo3", "TP 4", marks=pytest.mark.slow),
    pytest.param("gemma3", "TP 4", marks=pytest.mark.slow),
    pytest.param("smollm3", "TP 2 + SP", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_transformers_has_our_logits(family: str, layout: str, ranks: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForPreTraining

    size, tensor, sequence, zero, pipeline = LAYOUTS[layout]
    sections: dict[str, Any] = {"model": SIZES | (FAMILIES | FACTS)[family]}
    if family == "bert":
        sections["data"] = {"max_predictions": 3}
    config = config_of(tensor, sequence, zero, parallel={"pipeline": pipeline}, **sections)
    saved = on_ranks(ranks, size, run, config, 1, 0, None, str(tmp_path))[0].saved
    assert saved[0].problem is None, saved[0].problem
    folder = step_folder(tmp_path, 1)
    trainer = make_trainer(config_of(**sections))
    load(trainer, folder)
    ours: Any = trainer.model.eval()
    ids_BS = torch.randint(131, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if family == "bert":
            theirs = AutoModelForPreTraining.from_pretrained(folder).eval()(ids_BS)
            wanted = [theirs.prediction_logits.transpose(0, 1), theirs.seq_relationship_logits]
            found = ours.logits(ids_BS.t(), torch.zeros_like(ids_BS.t()), torch.ones_like(ids_BS.t()))
        else:
            wanted = [AutoModelForCausalLM.from_pretrained(folder).eval()(ids_BS).logits.transpose(0, 1)]
            found = [ours.logits(ids_BS.t())]
    for mine, expected in zip(found, wanted, strict=True):
        assert float(expected.std()) > 0.1, "the model says nothing about its input"
        difference = float((mine - expected).abs().max())
        assert difference <= 1e-5, f"logits are off by {difference:.1e}"
