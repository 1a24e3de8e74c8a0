"""The published numbers of the tutorials' models and runs, as their recipes must have them.

From the tutorials and scripts of AWS Neuron (neuronx-distributed and aws-neuron-samples), the models' own files on the
Hugging Face hub, and, where those disagree or are silent, the papers and configurations that the recipe names. Keys
of a recipe that no publication gives are not here, and no model that is one of the hub: test_recipes.py compares those
with their `config.json`.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """One recipe: ranks, derived data-parallel degree, parameters, and the value of every key that was published.

    `active`: parameters of a sparse model that a token meets in products, and the embedding; None: it is dense.
    """

    world: int
    data: int
    parameters: int
    keys: dict[str, Any]
    active: int | None = None


def _keys(section: str, **values: Any) -> dict[str, Any]:
    return {f"{section}.{key}": value for key, value in values.items()}


def _sizes(
    layers: int, hidden: int, heads: int, feed_forward: int, vocabulary: int, positions: int, std: float = 0.02
) -> dict[str, Any]:
    sizes = _keys("model", num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads)
    sizes |= _keys("model", intermediate_size=feed_forward, vocab_size=vocabulary, max_position_embeddings=positions)
    return {**sizes, "model.initializer_range": std}


def _layout(tensor: int, sequence: bool, zero: int, pipeline: int = 1) -> dict[str, Any]:
    parallel = _keys("parallel", tensor=tensor, sequence=sequence, pipeline=pipeline, schedule="1f1b")
    return {**parallel, "optimizer.zero": zero, "precision.mode": "mixed"}


def _batch(global_batch: int, micro_batch: int, sequence_length: int) -> dict[str, Any]:
    return _keys("train", global_batch=global_batch, micro_batch=micro_batch, sequence_length=sequence_length)


def _rate(
    lr: float, warmup_steps: int, steps: int, schedule: str, betas: tuple[float, float], decay: float = 0.01
) -> dict[str, Any]:
    update = _keys("optimizer", name="adamw", betas=betas, weight_decay=decay, max_norm=1.0)
    return {"train.steps": steps, **update, **_keys("optimizer", lr=lr, warmup_steps=warmup_steps, schedule=schedule)}


_NEOX = {"train.seed": 12349, "optimizer.eps": 1e-8}
_BERT = {"train.seed": 12349, "optimizer.eps": 1e-6}
_LLAMA3 = {"train.sequence_length": 8192, "optimizer.schedule": "cosine", "optimizer.warmup_steps": 8000}
_GPT3 = {
    **_keys("model", activation_function="gelu", layer_norm_epsilon=1e-5, tie_word_embeddings=True),
    **_keys("model", embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1, ffn_dropout=0.1),
    "parallel.vocab_multiple": 128,
    "optimizer.min_lr": 1e-5,
    "optimizer.constant_steps": 80_000,
    "checkpoint.every_minutes": 60,
    "train.seed": 1234,
}

PUBLISHED = {
    "llama2-7b": Published(
        world=128,
        data=16,
        parameters=6_738_415_616,
        keys={
            **_layout(8, True, 1),
            **_batch(256, 1, 4096),
            **_rate(2e-5, 2000, 10000, "linear", (0.9, 0.999)),
            "optimizer.eps": 1e-6,
            "train.seed": 12349,
            "train.recompute": "selective",
        },
    ),
    "llama2-70b": Published(
        world=64,
        data=64,
        parameters=68_976_648_192,
        keys={
            **_sizes(80, 8192, 64, 28672, 32000, 4096),
            **_keys("model", num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False),
            **_layout(1, False, 3),
            **_batch(1024, 1, 4096),
            **_rate(1.5e-4, 2000, 476_837, "cosine", (0.9, 0.95), decay=0.1),
            "optimizer.min_lr": 1.5e-5,
            "optimizer.eps": 1e-5,
        },
    ),
    "llama3.1-8b": Published(128, 128, 8_030_261_248, {**_LLAMA3, **_keys("optimizer", lr=3e-4, min_lr=3e-6)}),
    "llama3.1-70b": Published(512, 16, 70_553_706_496, {**_LLAMA3, **_keys("optimizer", lr=1.5e-4, min_lr=1.5e-6)}),
    "qwen3-0.6b": Published(8, 8, 596_049_920, {"train.sequence_length": 4096}),
    "qwen3-8b": Published(64, 64, 8_190_735_360, {"train.sequence_length": 4096}),
    "olmo3-7b": Published(
        world=256,
        data=256,
        parameters=7_298_011_136,
        keys={
            **_layout(1, False, 3),
            **_batch(512, 1, 8192),
            # int(5e12) // (8192 · 512)
            **_rate(3e-4, 2000, 1_192_092, "cosine", (0.9, 0.95), decay=0.1),
            "optimizer.min_lr": 3e-5,
            "optimizer.eps": 1e-8,
        },
    ),
    "smollm3-3b": Published(
        world=384,
        data=192,
        parameters=3_075_098_624,
        keys={
            **_layout(2, True, 0),
            **_batch(576, 3, 4096),
            **_rate(2e-4, 2000, 4_720_000, "wsd", (0.9, 0.95), decay=0.1),
            **_keys("optimizer", decay_steps=522_000, decay_shape="linear", min_lr=0.0, eps=1e-8),
            "train.seed": 6,
        },
    ),
    "gemma3-1b": Published(64, 32, 999_885_952, {"train.sequence_length": 32768}),
    "olmoe-1b-7b": Published(
        world=64,
        data=64,
        parameters=6_919_161_856,
        keys={
            **_layout(1, False, 1),
            **_batch(1024, 2, 4096),
            **_rate(4e-4, 2500, 1_223_842, "cosine", (0.9, 0.95), decay=0.1),
            "optimizer.min_lr": 4e-5,
            "optimizer.router_batch_loss": 0.01 / 16,
            "optimizer.router_z_loss": 0.001 / 16,
            "parallel.expert": 8,
        },
        active=1_281_884_160,
    ),
    "qwen3-30b-a3b": Published(64, 64, 30_532_122_624, {"parallel.expert": 8}, active=3_352_821_760),
    "mixtral-8x7b": Published(64, 16, 46_702_792_704, {"parallel.expert": 8}, active=12_879_659_008),
    "gpt-neox-6.9b": Published(
        world=128,
        data=16,
        parameters=6_857_302_016,
        keys={
            **_NEOX,
            **_layout(8, False, 1),
            **_batch(256, 1, 2048),
            **_rate(1.2e-4, 15, 1550, "linear", (0.9, 0.95)),
            "train.recompute": "full",
        },
    ),
    "gpt-neox-20b": Published(
        world=128,
        data=4,
        parameters=20_554_567_680,
        keys={
            **_NEOX,
            **_layout(32, True, 1),
            **_batch(256, 1, 2048),
            **_rate(0.97e-4, 100, 10000, "cosine", (0.9, 0.95)),
            "optimizer.min_lr": 0.97e-5,
            "train.recompute": "full",
        },
    ),
    "gpt-neox-20b-pp4": Published(128, 4, 20_554_567_680, _layout(8, True, 1, pipeline=4)),
    "bert-large": Published(
        world=32,
        data=4,
        parameters=336_226_108,
        keys={
            **_BERT,
            **_layout(8, False, 0),
            **_batch(16384, 64, 128),
            **_rate(4e-4, 2000, 28125, "linear", (0.9, 0.999)),
            "data.max_predictions": 20,
            "data.masked_fraction": 0.15,
        },
    ),
    "bert-large-phase2": Published(
        world=32,
        data=4,
        parameters=336_226_108,
        keys={
            **_BERT,
            **_layout(8, False, 0),
            **_batch(32768, 16, 512),
            **_rate(2.8e-4, 781, 1563, "linear", (0.9, 0.999)),
            "data.max_predictions": 80,
            "data.masked_fraction": 0.15,
            "checkpoint.load": "runs/bert-large/checkpoints/step-00028125",
        },
    ),
    "gpt2": Published(
        world=8,
        data=8,
        parameters=124_439_808,
        keys={
            **_layout(1, False, 1),
            **_batch(512, 8, 1024),
            **_rate(6e-4, 715, 572205, "cosine", (0.9, 0.95), decay=0.1),
            "optimizer.min_lr": 6e-5,
        },
    ),
    "gpt2-xl": Published(
        world=32,
        data=32,
        parameters=1_557_611_200,
        keys={
            **_layout(1, False, 1),
            **_batch(32, 1, 1024),
            **_rate(1.5e-4, 75, 100000, "cosine", (0.9, 0.999)),
            "train.recompute": "full",
        },
    ),
    "gpt3-23b": Published(
        world=128,
        data=4,
        parameters=22_980_059_136,
        keys={
            **_sizes(28, 8192, 64, 32768, 50257, 2048, std=0.021),
            **_GPT3,
            **_layout(8, True, 1, pipeline=4),
            **_batch(128, 1, 2048),
            **_rate(1.5e-4, 750, 300000, "cosine", (0.9, 0.95)),
            "train.recompute": "selective",
        },
    ),
    "gpt3-46b": Published(
        world=256,
        data=4,
        parameters=45_531_619_328,
        keys={
            **_sizes(56, 8192, 64, 32768, 50257, 2048, std=0.021),
            **_GPT3,
            **_layout(8, True, 1, pipeline=8),
            **_batch(256, 1, 2048),
            **_rate(1.5e-4, 750, 300000, "cosine", (0.9, 0.95)),
            "train.recompute": "full",
        },
    ),
    "gpt3-175b": Published(
        world=256,
        data=1,
        parameters=174_604_259_328,
        keys={
            **_sizes(96, 12288, 96, 49152, 50257, 2048, std=0.021),
            **_GPT3,
            **_layout(32, True, 1, pipeline=8),
            **_batch(256, 1, 2048),
            **_rate(5e-5, 750, 300000, "cosine", (0.9, 0.95)),
            "train.recompute": "full",  # the script's selective is for bfloat16 state
        },
    ),
}
