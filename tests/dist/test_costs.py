"""What `cost` computes is what a run does: bytes on the wire, bytes of state."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from shardwise.config import Config
from shardwise.cost import bytes_per_evaluation_batch, bytes_per_step, expected_memory, local_parameter_count
from shardwise.mesh import Mesh
from shardwise.train.build import build_trainer
from tests.dist.training import make_config, make_data

RANKS = 4
EVAL_BATCHES = 2
STATE_BYTES = {"float32": 8, "mixed": 12, "bfloat16": 4}

# (TP, sequence parallelism, ZeRO, key/value heads, precision, more): every two values meet in some row.
CASES: list[tuple[int, bool, int, int, str, dict[str, Any]]] = [
    (1, False, 0, 1, "float32", {}),
    (1, False, 1, 2, "mixed", {}),
    (1, True, 1, 1, "float32", {"optimizer": {"bucket_mib": 0.02}}),
    (2, False, 0, 2, "mixed", {}),
    (2, True, 1, 1, "mixed", {"model": {"attention_bias": True, "mlp_bias": True}}),
    (2, True, 0, 2, "float32", {"train": {"micro_batch": 1}}),
    (2, False, 1, 1, "float32", {"model": {"tie_word_embeddings": True}}),
    (4, False, 1, 1, "mixed", {}),
    (4, True, 0, 1, "float32", {"model": {"attention_bias": True}}),
    (4, True, 1, 2, "float32", {"model": {"tie_word_embeddings": True, "mlp_bias": True}}),
    (4, False, 0, 2, "mixed", {}),
    (2, True, 1, 2, "bfloat16", {"optimizer": {"bucket_mib": 0.02}}),
]


def case_config(case: tuple[int, bool, int, int, str, dict[str, Any]]) -> Config:
    tensor, sequence, zero, kv_heads, mode, more = case
    chosen: dict[str, dict[str, Any]] = {
        "model": {"num_key_value_heads": kv_heads, "num_hidden_layers": 2},
        "parallel": {"tensor": tensor, "sequence": sequence},
        "train": {"eval_batches": EVAL_BATCHES},
        "optimizer": {"zero": zero},
        "precision": {"mode": mode},
    }
    for section, values in more.items():
        chosen[section] = chosen[section] | values
    return make_config(**chosen)


def name(case: tuple[int, bool, int, int, str, dict[str, Any]]) -> str:
    tensor, sequence, zero, kv_heads, mode, _ = case
    return f"tp{tensor}{'-sp' if sequence else ''}-zero{zero}-kv{kv_heads}-{mode}"


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
    mesh = Mesh(tensor=config.parallel.tensor, device="cpu")
    data = make_data(config.model.vocab_size)
    data = replace(data, eval_tokens=data.train_tokens)
    trainer = build_trainer(config, config.check(mesh.world.size), mesh, data)
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


@pytest.mark.parametrize("case", CASES, ids=name)
def test_costs_are_what_happens(case: tuple[int, bool, int, int, str, dict[str, Any]], ranks: Any) -> None:
    config = case_config(case)
    layout = config.check(RANKS)
    memory = expected_memory(config, layout)
    everyone: list[Measured] = ranks(RANKS).run(measure, config)
    for rank, found in enumerate(everyone):
        compare(
            found.step, bytes_per_step(config, layout, data_rank=found.data_rank), found.calls, f"step, rank {rank}"
        )
        evaluation = {key: EVAL_BATCHES * sent for key, sent in bytes_per_evaluation_batch(config, layout).items()}
        if layout.data > 1:  # at the end the sum of losses and the number of targets, in float64
            key = ("dp", "all_reduce")
            evaluation[key] = evaluation.get(key, 0.0) + 2 * 16 * (layout.data - 1) / layout.data
        compare(found.evaluation, evaluation, found.calls, f"evaluation, rank {rank}")
        assert (found.parameters, found.gradients) == (memory.parameters, memory.gradients)
        assert found.optimizer == memory.optimizer, f"rank {rank} holds other optimizer state than cost has"
    mode, local = config.precision.mode, local_parameter_count(config.model, layout.tensor)
    assert mode is not None
    sharers = layout.data if config.optimizer.zero else 1
    for tensor_rank in range(layout.tensor):
        replica = everyone[tensor_rank :: layout.tensor][:sharers]
        bare = sum(found.optimizer - found.padding for found in replica)
        assert bare == STATE_BYTES[mode] * local, "state beside padding must be 8, 12 or 4 bytes a parameter"


def test_pairs_are_covered() -> None:
    values = [(1, 2, 4), (False, True), (0, 1), (1, 2), ("float32", "mixed")]
    for first in range(len(values)):
        for second in range(first):
            met = {(case[first], case[second]) for case in CASES}
            missing = {(a, b) for a in values[first] for b in values[second]} - met
            assert not missing, f"no case has {missing}"
