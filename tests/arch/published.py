"""The published numbers of the tutorials' models and runs, as their recipes must have them.

From the tutorials and scripts of AWS Neuron (neuronx-distributed and aws-neuron-samples), the models' own files on the
Hugging Face hub, and, where those disagree or are silent, the papers and configurations that the recipe names. Keys
of a recipe that no publication gives are not here.
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
    return _keys(
        "model",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=feed_forward,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        initializer_range=std,
    )


def _layout(tensor: int, sequence: bool, zero: int, pipeline: int = 1) -> dict[str, Any]:
    parallel = _keys("parallel", tensor=tensor, sequence=sequence, pipeline=pipeline, schedule="1f1b")
    return {**parallel, "optimizer.zero": zero, "precision.mode": "mixed"}


def _batch(global_batch: int, micro_batch: int, sequence_length: int) -> dict[str, Any]:
    return _keys("train", global_batch=global_batch, micro_batch=micro_batch, sequence_length=sequence_length)


def _rate(
    lr: float, warmup_steps: int, steps: int, schedule: str, betas: tuple[float, float], decay: float = 0.01
) -> dict[str, Any]:
    optimizer = _keys(
        "optimizer",
        name="adamw",
        lr=lr,
        warmup_steps=warmup_steps,
        schedule=schedule,
        betas=betas,
        weight_decay=decay,
        max_norm=1.0,
    )
    return {"train.steps": steps, **optimizer}


_NEOX = _keys(
    "model",
    rotary_pct=0.25,
    rope_theta=10000.0,
    layer_norm_eps=1e-5,
    use_parallel_residual=True,
    attention_bias=True,
    tie_word_embeddings=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
) | {"train.seed": 12349, "optimizer.eps": 1e-8}
_GPT2 = _keys(
    "model",
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    embd_pdrop=0.1,
    resid_pdrop=0.1,
    attn_pdrop=0.1,
    tie_word_embeddings=True,
)
_GPT3 = {
    **_GPT2,
    "model.activation_function": "gelu",
    "model.ffn_dropout": 0.1,
    "parallel.vocab_multiple": 128,
    "optimizer.min_lr": 1e-5,
    "optimizer.constant_steps": 80_000,
    "checkpoint.every_minutes": 60,
    "train.seed": 1234,
}
_BERT = _keys(
    "model",
    hidden_act="gelu",
    layer_norm_eps=1e-12,
    type_vocab_size=2,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
    tie_word_embeddings=True,
) | {"train.seed": 12349, "optimizer.eps": 1e-6}

_LLAMA3 = {
    **_keys("model", num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False),
    "train.sequence_length": 8192,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 8000,
}
_QWEN3 = {
    **_keys("model", num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6),
    "train.sequence_length": 4096,
}

PUBLISHED = {
    "llama2-7b": Published(
        world=128,
        data=16,
        parameters=6_738_415_616,
        keys={
            **_sizes(32, 4096, 32, 11008, 32000, 4096),
            **_keys("model", num_key_value_heads=32, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False),
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
    "llama3.1-8b": Published(
        world=128,
        data=128,
        parameters=8_030_261_248,
        keys={**_sizes(32, 4096, 32, 14336, 128256, 131072), **_LLAMA3, **_keys("optimizer", lr=3e-4, min_lr=3e-6)},
    ),
    "llama3.1-70b": Published(
        world=512,
        data=16,
        parameters=70_553_706_496,
        keys={**_sizes(80, 8192, 64, 28672, 128256, 131072), **_LLAMA3, **_keys("optimizer", lr=1.5e-4, min_lr=1.5e-6)},
    ),
    "qwen3-0.6b": Published(
        world=8,
        data=8,
        parameters=596_049_920,
        keys={**_sizes(28, 1024, 16, 3072, 151936, 40960), **_QWEN3, "model.tie_word_embeddings": True},
    ),
    "qwen3-8b": Published(
        world=64,
        data=64,
        parameters=8_190_735_360,
        keys={**_sizes(36, 4096, 32, 12288, 151936, 40960), **_QWEN3, "model.tie_word_embeddings": False},
    ),
    "olmo3-7b": Published(
        world=256,
        data=256,
        parameters=7_298_011_136,
        keys={
            **_sizes(32, 4096, 32, 11008, 100278, 65536),
            **_keys("model", num_key_value_heads=32, sliding_window=4096, rms_norm_eps=1e-6, rope_theta=500000.0),
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
            **_sizes(36, 2048, 16, 11008, 128256, 65536),
            **_keys("model", num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=5e6, tie_word_embeddings=True),
            **_layout(2, True, 0),
            **_batch(576, 3, 4096),
            **_rate(2e-4, 2000, 4_720_000, "wsd", (0.9, 0.95), decay=0.1),
            **_keys("optimizer", decay_steps=522_000, decay_shape="linear", min_lr=0.0, eps=1e-8),
            "train.seed": 6,
        },
    ),
    "gemma3-1b": Published(
        world=64,
        data=32,
        parameters=999_885_952,
        keys={
            **_sizes(26, 1152, 4, 6912, 262144, 32768),
            **_keys("model", num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256, sliding_window=512),
            **_keys("model", rms_norm_eps=1e-6, rope_theta=1e6, rope_local_base_freq=1e4, tie_word_embeddings=True),
            "train.sequence_length": 32768,
        },
    ),
    "olmoe-1b-7b": Published(
        world=64,
        data=64,
        parameters=6_919_161_856,
        active=1_281_884_160,
        keys={
            **_sizes(16, 2048, 16, 1024, 50304, 4096),
            **_keys("model", num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, rms_norm_eps=1e-5),
            **_keys("model", rope_theta=10000.0, tie_word_embeddings=False),
            **_layout(1, False, 1),
            **_batch(1024, 2, 4096),
            **_rate(4e-4, 2500, 1_223_842, "cosine", (0.9, 0.95), decay=0.1),
            "optimizer.min_lr": 4e-5,
            "optimizer.router_batch_loss": 0.01 / 16,
            "optimizer.router_z_loss": 0.001 / 16,
            "parallel.expert": 8,
        },
    ),
    "qwen3-30b-a3b": Published(
        world=64,
        data=64,
        parameters=30_532_122_624,
        active=3_352_821_760,
        keys={
            **_sizes(48, 2048, 32, 6144, 151936, 40960),
            **_keys("model", num_key_value_heads=4, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6),
            **_keys("model", num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True),
            **_keys("model", tie_word_embeddings=False, decoder_sparse_step=1),
            "parallel.expert": 8,
        },
    ),
    "mixtral-8x7b": Published(
        world=64,
        data=16,
        parameters=46_702_792_704,
        active=12_879_659_008,
        keys={
            **_sizes(32, 4096, 32, 14336, 32000, 32768),
            **_keys("model", num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5),
            **_keys("model", rope_theta=1e6, tie_word_embeddings=False),
            "parallel.expert": 8,
        },
    ),
    "gpt-neox-6.9b": Published(
        world=128,
        data=16,
        parameters=6_857_302_016,
        keys={
            **_sizes(32, 4096, 32, 16384, 50432, 2048),
            **_NEOX,
            "model.hidden_act": "gelu",
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
            **_sizes(44, 6144, 64, 24576, 50432, 2048),
            **_NEOX,
            "model.hidden_act": "gelu_fast",
            **_layout(32, True, 1),
            **_batch(256, 1, 2048),
            **_rate(0.97e-4, 100, 10000, "cosine", (0.9, 0.95)),
            "optimizer.min_lr": 0.97e-5,
            "train.recompute": "full",
        },
    ),
    "gpt-neox-20b-pp4": Published(
        world=128,
        data=4,
        parameters=20_554_567_680,
        keys={
            **_sizes(44, 6144, 64, 24576, 50432, 2048),
            **_NEOX,
            "model.hidden_act": "gelu_fast",
            **_layout(8, True, 1, pipeline=4),
            **_batch(256, 1, 2048),
            **_rate(0.97e-4, 100, 10000, "cosine", (0.9, 0.95)),
            "optimizer.min_lr": 0.97e-5,
            "train.recompute": "full",
        },
    ),
    "bert-large": Published(
        world=32,
        data=4,
        parameters=336_226_108,
        keys={
            **_sizes(24, 1024, 16, 4096, 30522, 512),
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
            **_sizes(24, 1024, 16, 4096, 30522, 512),
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
            **_sizes(12, 768, 12, 3072, 50257, 1024),
            **_GPT2,
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
            **_sizes(48, 1600, 25, 6400, 50257, 1024),
            **_GPT2,
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
