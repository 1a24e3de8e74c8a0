"""What a user reads when memory ran out: where, how much, and what would help."""

import re
from typing import Any

import pytest
import torch

from shardwise.base import units
from shardwise.base.errors import ConfigError
from shardwise.config import Config, Layout, config_from_sections
from shardwise.distributed import devices
from shardwise.estimates.memory import expected_memory
from shardwise.train.device_checks import out_of_memory_text, require_device
from shardwise.train.step_record import Progress

MODEL = {
    "family": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip


def config(**changes: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "train": {"steps": 1, "global_batch": 30, "micro_batch": 15, "sequence_length": 64},
        "optimizer": {"lr": 1e-3},
        "precision": {"mode": "float32"},
    }
    return config_from_sections(base | {section: base.get(section, {}) | values for section, values in changes.items()})


def text(chosen: Config, layout: Layout, error: BaseException | None = None, **progress: Any) -> str:
    """Of the last rank."""
    last, cause = layout.world - 1, error or MemoryError("no room\nmore")
    return out_of_memory_text(chosen, layout, last, torch.device("cpu"), Progress(**progress), cause)


def remedies(chosen: Config, layout: Layout) -> list[str]:
    (line,) = re.findall(r"^what would help: (.*)$", text(chosen, layout), re.MULTILINE)
    return line.split("; ")


def test_where_memory_ran_out_and_which_remedies_save_most() -> None:
    chosen, layout = config(), Layout(2)
    said = text(chosen, layout, step=1200, phase="gradient reduction")
    address = "(`shardwise explain out-of-memory`)"
    assert f"rank 1 ran out of memory on cpu during gradient reduction, after step 1,200 {address}" in said
    for kind, amount in expected_memory(chosen, layout).rows():
        assert f"{kind} {units.size(amount)}" in said, f"the bytes of {kind} are missing"
    assert said.endswith("cause: no room"), "the first line of the error itself is missing"
    assert text(chosen, layout, MemoryError()).endswith("cause: MemoryError"), "an empty error has at least a name"

    def cut(zero: int = 0, context: int = 1, **sections: dict[str, Any]) -> Config:
        return config(parallel={"tensor": 2, "context": context}, optimizer={"zero": zero}, **sections)

    chosen, layout = cut(), Layout(4, tensor=2)
    then = {
        "train.micro_batch=5": (cut(train={"micro_batch": 5}), layout),
        "train.recompute=full": (cut(train={"recompute": "full"}), layout),
        "parallel.sequence=true": (chosen, Layout(4, tensor=2, sequence_parallel=True)),
        **{f"optimizer.zero={stage}": (cut(stage), layout) for stage in (1, 2, 3)},
        "precision.mode=mixed": (cut(precision={"mode": "mixed"}), layout),
        "parallel.tensor=4 on 8 ranks": (chosen, Layout(8, tensor=4)),
        "parallel.context=2 on 8 ranks": (cut(context=2), Layout(8, tensor=2, context=2)),
    }
    now = expected_memory(chosen, layout).total
    saved = {name: now - expected_memory(*other).total for name, other in then.items()}
    expected = [f"{name} ({units.size(amount)} less)" for name, amount in sorted(saved.items(), key=lambda x: -x[1])]
    assert remedies(chosen, layout) == expected, "or a remedy saves nothing, and is left out"
    found = [one.split()[0] for one in remedies(config(), Layout(1)) if one.startswith("train.micro_batch")]
    assert found == ["train.micro_batch=5"], "half of 15 is 7, which does not divide 30"
    said = remedies(config(parallel={"tensor": 4, "sequence": True}), Layout(4, tensor=4, sequence_parallel=True))
    refused = [one for one in said if one.startswith(("parallel.tensor", "parallel.sequence="))]
    assert not refused, "TP 8 does not divide 4 heads, and sequence is on already"
    assert not [one for one in said if one.startswith("parallel.pipeline=4")], "two layers are no four stages"
    for valid in ("parallel.pipeline=2 on 8 ranks", "parallel.context=2 on 8 ranks"):
        assert [one for one in said if one.startswith(valid)]
    odd = remedies(config(train={"global_batch": 15}), Layout(1))
    assert not [one for one in odd if "share the optimizer state" in one], "15 samples do not divide over 2 replicas"


GIB = 2**30
FP8 = {"matmul": "fp8"}
REFUSED = "refused: memory of parameters, gradients and optimizer"


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """One of 16 GiB, of which an allocator has reserved 12 and tensors hold 8."""
    device = torch.device("cuda", 0)
    held = {"allocated": 8 * GIB, "reserved": 12 * GIB, "most_allocated": 9 * GIB, "most_reserved": 12 * GIB}
    monkeypatch.setattr(devices, "allocator_bytes", lambda device: held)
    monkeypatch.setattr(devices, "total_memory", lambda device: 16 * GIB)
    monkeypatch.setattr(devices, "peak_memory", lambda device: 9 * GIB)
    monkeypatch.setattr(devices, "name", lambda device: "some GPU")
    monkeypatch.setattr(devices, "computes_in", lambda device, dtype: dtype in (torch.float32, torch.bfloat16))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return device


def test_memory_of_allocators_hosts_and_other_ranks(accelerator: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> str:
        return out_of_memory_text(config(), Layout(2), 0, accelerator, Progress(), MemoryError())

    line = "\nallocator: 8.0 GiB in tensors, 4.0 GiB more reserved, of 16.0 GiB"
    assert f"{line}\n" in said(), "a run has expandable segments unless the user says otherwise"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert f"{line}; PYTORCH_ALLOC_CONF with expandable_segments:True lets tensors use what is reserved" in said()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert f"{line}\n" in said()
    offloaded = config(optimizer={"lr": 1e-3, "offload": True})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("shardwise.train.device_checks.available_memory", lambda: GIB)
    assert require_device(offloaded, Layout(2), 0, accelerator) is None
    monkeypatch.setattr("shardwise.train.device_checks.available_memory", lambda: 2**16)
    with pytest.raises(ConfigError, match=r"^the optimizer state of the 2 ranks on this machine \(.*\), which"):
        require_device(offloaded, Layout(2), 0, accelerator)
    assert require_device(config(), Layout(2), 0, accelerator) is None
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr("shardwise.train.device_checks.available_memory", lambda: GIB)
    chosen = config(parallel={"tensor": 2, "sequence": True, "tensor_overlap": "symmetric_memory"})
    with pytest.raises(ConfigError, match=r"^parallel.tensor_overlap \(symmetric_memory\) must be pieces .* some GPU "):
        require_device(chosen, Layout(2, tensor=2, sequence_parallel=True), 0, accelerator)
    assert require_device(chosen, Layout(1), 0, torch.device("cpu")) is None


def said_before_the_start(chosen: Config, layout: Layout, rank: int, device: torch.device) -> str:
    try:
        return require_device(chosen, layout, rank, device) or ""
    except ConfigError as error:
        return f"refused: {error}"


@pytest.mark.parametrize(
    ("hidden", "tokens", "said"),
    [
        (64, 64, "$"),
        (64, 2**21, r"the expected memory \(.*\) exceeds the 16.0 GiB of some GPU: train.micro_batch=5 \("),
        (32768, 64, rf"{REFUSED} \(.*\) must be at most the 16.0 GiB"),
    ],
)
def test_a_model_that_does_not_fit_is_told(accelerator: torch.device, hidden: int, tokens: int, said: str) -> None:
    chosen = config(model={"hidden_size": hidden, "max_position_embeddings": tokens}, train={"sequence_length": tokens})
    assert re.match(said, said_before_the_start(chosen, Layout(2), 0, accelerator))


@pytest.mark.parametrize(
    ("available", "said"),
    [
        (2 * GIB, "$"),
        (GIB, r"the expected memory of the 4 ranks on this machine \(1.\d GiB\) exceeds the 1.0 GiB that it has "),
        (2**16, rf"{REFUSED} of the 4 ranks on this machine \(.*\) must be "),
    ],
)
def test_fault_04_ranks_of_a_machine_share_memory(available: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.train.device_checks.available_memory", lambda: available)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    train = {"sequence_length": 2**14, "micro_batch": 2, "global_batch": 16}
    chosen = config(model={"max_position_embeddings": 2**14}, train=train)
    found = said_before_the_start(chosen, Layout(8), 7, torch.device("cpu"))
    assert re.match(said, found)
    assert "on 16 ranks" not in found, "more ranks on one machine save no memory"


@pytest.mark.parametrize(
    ("lacking", "precision", "told"),
    [
        ("computes_in", {"mode": "bfloat16"}, r"^precision.mode \(bfloat16\) must be float32: some GPU"),
        ("multiplies_fp8", {"mode": "mixed"} | FP8, r"^precision.matmul \(fp8\) must be left out on some GPU"),
    ],
)
def test_a_precision_that_the_device_lacks_is_refused(
    lacking: str, precision: dict[str, str], told: str, accelerator: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "multiplies_fp8", lambda device: True)
    assert require_device(config(precision=precision), Layout(2), 0, accelerator) is None
    monkeypatch.setattr(devices, lacking, lambda *_: False)
    with pytest.raises(ConfigError, match=told):
        require_device(config(precision=precision), Layout(2), 0, accelerator)


def test_what_a_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert devices.allocator_bytes(cpu) == {}
    assert devices.total_memory(cpu) is None
    assert devices.computes_in(cpu, torch.bfloat16)
    assert not devices.computes_in(cpu, torch.quint8)
    assert devices.multiplies_fp8(cpu)
    assert not devices.multiplies_fp8(torch.device("meta"))
    assert require_device(config(), Layout(2), 0, cpu) is None
