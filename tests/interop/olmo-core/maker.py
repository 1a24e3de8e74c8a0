"""OLMo-core's own trainer trains a tiny model on gloo ranks with FSDP2 and saves it: `torchrun … maker.py SPEC.json`.

Everything is theirs but the loader, which gives the batches of the test in their order.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from olmo_core.config import DType
from olmo_core.data.data_loader import TextDataLoaderBase
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
from olmo_core.nn.rope import RoPEType, YaRNRoPEScalingConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.nn.transformer.config import TransformerBlockType
from olmo_core.optim import AdamWConfig, CosWithWarmup, OptimGroupOverride, SkipStepAdamWConfig
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import Callback, CheckpointerCallback, ConfigSaverCallback
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

SIZES: dict[str, Any] = {
    "d_model": 64, "vocab_size": 128, "n_layers": 3, "n_heads": 4, "hidden_size_multiple_of": 32,
    "attn_backend": AttentionBackendName.torch,
}  # fmt: skip
REORDERED = {
    "block_name": TransformerBlockType.reordered_norm, "qk_norm": True, "layer_norm_eps": 1e-6, "rope_theta": 500_000,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "olmo2": REORDERED,
    "olmo3": REORDERED | {
        "n_kv_heads": 2,
        "sliding_window": SlidingWindowAttentionConfig(
            pattern=[8, 8, 8, -1], force_full_attention_on_first_layer=False, force_full_attention_on_last_layer=True
        ),
    },
    "olmo3-yarn": REORDERED | {
        "sliding_window": SlidingWindowAttentionConfig(pattern=[8, 8, 8, -1]),
    },
    "llama": {"n_kv_heads": 2, "rope_type": RoPEType.complex, "tie_word_embeddings": True},
    "qwen3": {
        "n_kv_heads": 2, "head_dim": 24, "qk_norm": True, "use_head_qk_norm": True, "layer_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
    },
}  # fmt: skip


class Loader(TextDataLoaderBase):
    def __init__(self, spec: dict[str, Any], folder: str) -> None:
        self.batches = torch.from_numpy(np.load(spec["batches"]))
        super().__init__(
            collator=None, work_dir=folder, global_batch_size=self.batches[0, :, :-1].numel(),
            dp_world_size=get_world_size(), dp_rank=get_rank(), fs_local_rank=get_rank(),
        )  # fmt: skip

    @property
    def total_batches(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {"batches_processed": self.batches_processed, "epoch": self._epoch, "seed": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches_processed = state_dict["batches_processed"]

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        self._epoch = epoch or 1

    def _iter_batches(self) -> Iterable[dict[str, Any]]:
        for batch in self.batches[self.batches_processed :]:
            rows = batch.chunk(get_world_size())[get_rank()]
            # The labels are the ids, one later: what has none after it is left out.
            yield {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    def get_mock_batch(self) -> dict[str, Any]:
        rows = self.batches[0].chunk(get_world_size())[get_rank()]
        return {"input_ids": rows[:, :-1].contiguous()}


class Losses(Callback):
    """The loss of each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: list[float] = []

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.losses += [value for name, value in metrics.items() if name == "train/CE loss"]
        if get_rank() == 0:
            self.path.write_text(json.dumps(self.losses))


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    folder = Path(spec["folder"])
    prepare_training_environment(backend="cpu:gloo")
    options = {**SIZES, **MODELS[spec["model"]]}
    model_config = TransformerConfig.llama_like(**options)
    if spec["model"] == "olmo3-yarn":
        scaling = YaRNRoPEScalingConfig(factor=4.0, beta_fast=2, old_context_len=16)
        model_config = model_config.with_rope_scaling(scaling)
    optim = {"skip": SkipStepAdamWConfig, "adamw": AdamWConfig}[spec["optimizer"]](
        lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95),
        group_overrides=[OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})],
        **spec.get("options", {}),
    )  # fmt: skip
    module_config = TransformerTrainModuleConfig(
        rank_microbatch_size=2 * 32, max_sequence_length=32, optim=optim, max_grad_norm=0.5,
        scheduler=CosWithWarmup(warmup_steps=4, alpha_f=0.1),
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp, param_dtype=DType.float32),
    )  # fmt: skip
    losses = Losses(folder / "losses.json")
    config = {
        "model": model_config.as_config_dict(),
        "train_module": module_config.as_config_dict(),
        "trainer": TrainerConfig(str(folder), max_duration=Duration.steps(spec["steps"])).as_config_dict(),
    }
    trainer_config = (
        TrainerConfig(
            save_folder=str(folder / "run"), save_overwrite=True, max_duration=Duration.steps(spec["steps"]),
            hard_stop=Duration.steps(spec["stop"]), metrics_collect_interval=1,
        )
        .with_callback("checkpointer", CheckpointerCallback(save_interval=spec["save_at"], save_async=False))
        .with_callback("config_saver", ConfigSaverCallback())
        .with_callback("losses", losses)
    )  # fmt: skip
    torch.manual_seed(3)
    model = model_config.build(init_device="meta")
    module = module_config.build(model)
    with torch.no_grad():
        for weight in module.model.parameters():
            if weight.dim() == 1:
                weight.mul_(1.5)  # so that the decay of norms is seen
    trainer = trainer_config.build(module, Loader(spec, str(folder)))
    trainer.callbacks["config_saver"].config = config
    trainer.fit()
    if dist.is_initialized():
        teardown_training_environment()


if __name__ == "__main__":
    main(sys.argv[1])
