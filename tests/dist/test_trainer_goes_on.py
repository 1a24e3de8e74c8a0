"""A training of the Hugging Face Trainer goes on here: the same batches give the Trainer's next ten losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.format.verify import verify_checkpoint
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config
from shardwise_use.importing.hugging_face import open_hugging_face, write_imported_checkpoint
from shardwise_use.importing.hugging_face_trainer import with_trainer_progress
from tests.dist.checkpoints import make_trainer, run
from tests.dist.dense import run as on_ranks
from tests.dist.training import make_config
from tests.hugging_face import make
from tests.sweeps import few

BEFORE, AFTER, BATCH = 6, 10, 8
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "qwen3_moe": {},
    "glm4_moe": {},
}


@dataclass(frozen=True)
class Continued:
    """A training of the Trainer: its step 6 imported, its keys, and the losses of its next ten steps."""

    folder: Path
    sections: dict[str, dict[str, Any]]
    losses: list[float]

    def config(self, **parallel: Any) -> Config:
        zero = parallel.pop("zero", 1)
        sections = {name: dict(values) for name, values in self.sections.items()}
        sections["optimizer"] |= {"zero": zero, "warmup_steps": 0}
        return make_config(**sections, parallel=parallel)


def train_elsewhere(case: str, folder: Path) -> Continued:
    from transformers import Trainer, TrainingArguments

    model = make(case, **FAMILIES[case])
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=BEFORE + AFTER, save_steps=BEFORE, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, per_device_train_batch_size=BATCH // 2, gradient_accumulation_steps=2,
        learning_rate=5e-3, warmup_steps=4, lr_scheduler_type="cosine", weight_decay=0.1, adam_beta2=0.95,
        max_grad_norm=0.5, train_sampling_strategy="sequential", include_num_input_tokens_seen="all",
    )  # fmt: skip
    sections = {"model": described(model, folder / "model"), "train": {"global_batch": BATCH, "sequence_length": 16}}
    samples = batches(make_config(**sections), BATCH * (BEFORE + AFTER))
    labels = samples.clone()
    # Nothing predicts the first; of GPT-2's labels the Trainer counts it in the divisor of the loss all the same.
    labels[:, 0] = -100
    rows = [{"input_ids": ids, "labels": of_row} for ids, of_row in zip(samples, labels, strict=True)]
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert min(norms) > 0.5, "every step is clipped"
    saved = folder / f"checkpoint-{BEFORE}"
    opened = with_trainer_progress(open_hugging_face(Root.of(saved)), saved)
    assert opened.progress is not None
    assert (opened.progress.step, opened.progress.samples) == (BEFORE, BEFORE * BATCH)
    for key, value in opened.progress.keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    written = write_imported_checkpoint(opened, Root.of(folder / "ours"), max_shard_bytes=20_000).folder
    assert verify_checkpoint(written).sound
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Continued(written.local(), sections, losses[BEFORE:])


def described(model: Any, folder: Path) -> dict[str, Any]:
    from tests.hugging_face import described as described_model

    model.config.save_pretrained(folder)
    section: dict[str, Any] = described_model(folder).model_dump()
    return section


def batches(config: Config, count: int) -> torch.Tensor:
    """The samples of a run here in their order, with all their targets `[B, S + 1]`."""
    batch = make_trainer(config).feed.batches.global_batch(0, count)
    tokens, targets = (torch.from_numpy(batch.inputs[name]).long() for name in ("ids_SB", "targets_SB"))
    return torch.cat([tokens, targets[-1:]]).T.contiguous()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Continued]:
    made: dict[str, Continued] = {}

    def of(case: str) -> Continued:
        if case not in made:
            made[case] = train_elsewhere(case, tmp_path_factory.mktemp(case))
        return made[case]

    return of


OFTEN = ("llama", "qwen3_moe")


@pytest.mark.parametrize("case", few(FAMILIES, *OFTEN))
def test_the_next_ten_losses_are_the_trainers(elsewhere: Callable[[str], Continued], case: str) -> None:
    continued = elsewhere(case)
    losses = run(continued.config(), AFTER, 0, str(continued.folder), None).losses
    assert losses == pytest.approx(continued.losses, rel=0, abs=1e-5)


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tensor": 2, "sequence": True}),
    (2, {"pipeline": 2}),
    (2, {"zero": 3}),
    (2, {"zero": 0}),
    (2, {"zero": 2}),
    (4, {"tensor": 2, "pipeline": 2}),
    (4, {"tensor": 2, "zero": 3}),
]


@pytest.mark.parametrize(("size", "parallel"), few(LAYOUTS, LAYOUTS[0]))
def test_at_any_layout(ranks: Any, elsewhere: Callable[[str], Continued], size: int, parallel: dict[str, Any]) -> None:
    continued = elsewhere("llama")
    for result in on_ranks(ranks, size, run, continued.config(**parallel), AFTER, 0, str(continued.folder), None):
        assert result.losses == pytest.approx(continued.losses, rel=0, abs=1e-5)
