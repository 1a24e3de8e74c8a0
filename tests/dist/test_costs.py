"""What `cost` computes is what a run does: bytes on the wire, bytes of state."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from shardwise.config import Config, check_layout
from shardwise.cost import bytes_per_evaluation_batch, bytes_per_step, expected_memory
from shardwise.mesh import Mesh
from shardwise.plan import local_parameter_count
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config, make_data

RANKS = 4
EVAL_BATCHES = 2
STATE_BYTES = {"float32": 8, "mixed": 12, "bfloat16": 4}

SIZES: dict[str, Any] = {
    "vocab_size": 131,  # odd: the vocabulary is padded at every degree
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "shared": {"family": "llama", "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"family": "qwen3", "num_key_value_heads": 2, "head_dim": 8},
    "olmo2": {"family": "olmo2", "num_key_value_heads": 2},
    "gpt": {"family": "gpt"},
    "untied": {"family": "gpt", "tie_word_embeddings": False},
    "neox": {"family": "gpt_neox"},
    "serial": {"family": "gpt_neox", "use_parallel_residual": False, "attention_bias": False},
    "bert": {"family": "bert"},
}
DROPOUT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "qwen3", "olmo2"), ("attention_dropout",)),
    "gpt": ("embd_pdrop", "resid_pdrop", "attn_pdrop"),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}

Case = tuple[str, int, bool, int, str, str, str, str | None]
# (model, TP, sequence parallelism, ZeRO, precision, recompute, optimizer, dropout): every two values meet in some row.
# Every second row always runs.
CASES: list[Case] = [
    ("llama", 1, False, 0, "mixed", "none", "adamw", None),
    ("llama", 2, False, 0, "float32", "full", "adamw", "invariant"),
    ("llama", 4, True, 1, "float32", "selective", "lamb", "fast"),
    ("shared", 1, False, 0, "float32", "selective", "adamw", "fast"),
    ("shared", 2, False, 0, "float32", "none", "lamb", None),
    ("shared", 2, True, 1, "bfloat16", "none", "adamw", None),
    ("shared", 4, True, 1, "mixed", "full", "adamw", "invariant"),
    ("gpt", 1, False, 0, "float32", "selective", "adamw", "invariant"),
    ("gpt", 2, False, 0, "float32", "full", "adamw", "fast"),
    ("gpt", 2, True, 1, "float32", "full", "adamw", None),
    ("gpt", 4, True, 1, "mixed", "none", "lamb", None),
    ("untied", 1, True, 1, "float32", "selective", "lamb", None),
    ("untied", 2, False, 0, "mixed", "none", "adamw", "invariant"),
    ("untied", 2, True, 1, "float32", "full", "lamb", "fast"),
    ("untied", 4, False, 0, "float32", "full", "adamw", "fast"),
    ("neox", 1, False, 0, "mixed", "full", "adamw", "invariant"),
    ("neox", 2, True, 1, "float32", "none", "lamb", "fast"),
    ("neox", 2, True, 1, "float32", "full", "adamw", None),
    ("neox", 4, False, 0, "float32", "selective", "adamw", None),
    ("neox", 4, True, 1, "float32", "full", "adamw", "invariant"),
    ("serial", 1, True, 1, "mixed", "none", "adamw", "fast"),
    ("serial", 2, False, 0, "float32", "full", "adamw", None),
    ("serial", 4, False, 0, "float32", "selective", "lamb", "invariant"),
    ("bert", 1, False, 1, "float32", "full", "lamb", None),
    ("bert", 2, True, 0, "mixed", "selective", "adamw", "fast"),
    ("bert", 2, True, 1, "float32", "full", "adamw", "fast"),
    ("bert", 4, True, 1, "float32", "full", "lamb", None),
    ("bert", 4, False, 0, "float32", "none", "adamw", "invariant"),
    ("qwen3", 2, True, 1, "mixed", "selective", "adamw", "fast"),
    ("qwen3", 4, False, 0, "float32", "full", "lamb", None),
    ("qwen3", 1, False, 1, "float32", "none", "adamw", "invariant"),
    ("olmo2", 4, True, 0, "mixed", "full", "adamw", None),
    ("olmo2", 2, False, 1, "float32", "selective", "adamw", "invariant"),
    ("olmo2", 1, False, 0, "float32", "none", "lamb", "fast"),
]


def case_config(case: Case) -> Config:
    model, tensor, sequence, zero, mode, recompute, optimizer, dropout = case
    p = dict.fromkeys(DROPOUT[MODELS[model]["family"]], 0.1 if dropout else 0.0)
    return make_config(
        model=SIZES | MODELS[model] | p,
        parallel={"tensor": tensor, "sequence": sequence},
        train={
            "eval_batches": EVAL_BATCHES,
            "recompute": recompute,
            "dropout_mode": dropout or "fast",
            "micro_batch": tensor,  # two micro-batches a step
        },
        # Several buckets, but for models that are cut in four: one.
        optimizer={"zero": zero, "name": optimizer, "bucket_mib": 25.0 if tensor == 4 else 0.02},
        precision={"mode": mode},
    )


def name(case: Case) -> str:
    model, tensor, sequence, zero, mode, recompute, optimizer, dropout = case
    return f"{model}-tp{tensor}{'-sp' if sequence else ''}-zero{zero}-{mode}-{recompute}-{optimizer}-{dropout}"


@dataclass
class Measured:
    """On one rank: wire bytes and calls by (axis, kind), and bytes of what is held."""

    data_rank: int
    step: Counter[tuple[str, str]]
    evaluation: Counter[tuple[str, str]]
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    padding: int = 0


def count(mesh: Mesh) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Bytes and calls since the last count."""
    sent: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for group in mesh.groups:
        for axis, meter in group.meters.items():
            for kind, amount in meter.bytes.items():
                sent[axis, kind] += amount
                calls[axis, kind] += meter.calls[kind]
            meter.reset()
    return sent, calls


def measure(config: Config) -> Measured:
    mesh = shared_mesh(config.parallel.tensor)
    data = make_data(config.model.vocab_size, pairs="nsp" in config.model.objectives)
    sentences = dict.fromkeys(data.sentences, data.sentences["train"]) if data.sentences else data.sentences
    data = replace(data, eval_tokens=data.train_tokens, sentences=sentences)
    trainer = build_trainer(config, mesh, data)
    trainer.step()
    count(mesh)
    trainer.step()  # not the first: that one makes subgroups and the optimizer's state
    step, calls = count(mesh)
    trainer.evaluate()
    evaluation, more_calls = count(mesh)
    buckets, state = trainer.optimizer.buckets, trainer.optimizer.state_bytes()
    return Measured(
        data_rank=mesh.dp.rank,
        step=step,
        evaluation=evaluation,
        calls=calls + more_calls,
        parameters=sum(bucket.values.nbytes for bucket in buckets),
        gradients=sum(bucket.gradients.nbytes for bucket in buckets),
        optimizer=state["state"] + state["masters"],
        padding=state["padding"],
    )


def compare(
    found: Counter[tuple[str, str]], wanted: dict[tuple[str, str], float], calls: Counter[tuple[str, str]], what: str
) -> None:
    assert set(found) == set(wanted), f"{what}: other collectives than cost has"
    for key, amount in wanted.items():
        # The meter rounds each call down to a whole byte.
        assert 0 <= amount - found[key] <= calls[key], (
            f"{what}: {found[key]:,} bytes were sent by {key}, cost has {amount:,}"
        )


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if i % 2 else pytest.mark.slow, id=name(case)) for i, case in enumerate(CASES)]
)
def test_costs_are_what_happens(case: Case, ranks: Any) -> None:
    config = case_config(case)
    layout = check_layout(config, RANKS)
    memory, evaluated = expected_memory(config, layout), bytes_per_evaluation_batch(config, layout)
    assert memory is not None
    assert evaluated is not None
    everyone: list[Measured] = ranks(RANKS).run(measure, config)
    for rank, found in enumerate(everyone):
        step = bytes_per_step(config, layout, data_rank=found.data_rank)
        assert step is not None
        compare(found.step, step, found.calls, f"step, rank {rank}")
        evaluation = {key: EVAL_BATCHES * sent for key, sent in evaluated.items()}
        if layout.data > 1:  # at the end each objective's sum of losses and number of targets, in float64
            key, size = ("dp", "all_reduce"), 2 * 8 * len(config.model.objectives)
            evaluation[key] = evaluation.get(key, 0.0) + 2 * size * (layout.data - 1) / layout.data
        compare(found.evaluation, evaluation, found.calls, f"evaluation, rank {rank}")
        assert (found.parameters, found.gradients) == (memory.parameters, memory.gradients)
        assert found.optimizer == memory.optimizer, f"rank {rank} holds other optimizer state than cost has"
    mode, local = config.precision.mode, local_parameter_count(config.model, layout.tensor)
    assert mode is not None
    assert local is not None
    sharers = layout.data if config.optimizer.zero else 1
    for tensor_rank in range(layout.tensor):
        replica = everyone[tensor_rank :: layout.tensor][:sharers]
        bare = sum(found.optimizer - found.padding for found in replica)
        assert bare == STATE_BYTES[mode] * local, "state beside padding must be 8, 12 or 4 bytes a parameter"


def test_pairs_are_covered() -> None:
    values = [
        tuple(MODELS), (1, 2, 4), (False, True), (0, 1), ("float32", "mixed"), ("none", "selective", "full"),
        ("adamw", "lamb"), (None, "fast", "invariant"),
    ]  # fmt: skip
    for first in range(len(values)):
        for second in range(first):
            met = {(case[first], case[second]) for case in CASES}
            missing = {(a, b) for a in values[first] for b in values[second]} - met
            assert not missing, f"no case has {missing}"
