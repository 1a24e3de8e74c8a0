"""The commands on this machine's accelerator: `make test-device` (on CPU ranks other files test the same)."""

from pathlib import Path

import pytest

from tests.conftest import device_count
from tests.e2e.command import Outcome, metrics, miniature, shardwise

ONE = ("--nproc", "1", "--run-dir", "run")


@pytest.fixture(autouse=True)
def accelerator(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--device") == "cpu":
        pytest.skip("needs an accelerator: make test-device")


def test_a_run_resumes_on_the_accelerator(tmp_path: Path) -> None:
    def train(*keys: str) -> Outcome:
        return shardwise("train", miniature(tmp_path), *keys, *ONE, at=tmp_path).succeeded()

    train("train.stop_after=2")
    assert "cpu" not in train().out.partition("step")[0].lower(), "the summary at the start names the CPU"
    steps = metrics(tmp_path / "run", "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_layouts_train_like_one_process_there_and_on_the_cpu(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """With a single device, that is the accelerator against the CPU."""
    nproc = str(min(2, device_count(pytestconfig.getoption("--device"))))
    options = ("--devices", "cpu", "accelerator", "--nproc", nproc, "--steps", "2")
    done = shardwise("verify", "llama2-tiny", *options, at=tmp_path)
    assert done.code == 0, done.out + done.err


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents, by FlexAttention"])
def test_training_finds_the_graphs_of_the_command(documents: bool, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    if pytestconfig.getoption("--device") == "strict":
        pytest.skip("torch compiles nothing for the strict device")
    kept = ("compile.cache_dir=graphs", f"data.reset_attention_mask={str(documents).lower()}")
    recipe = miniature(tmp_path)
    kept += ("model.hidden_size=64",)  # FlexAttention on CUDA takes heads of at least 16 elements
    shardwise("compile", recipe, *kept, "--nproc", "1", at=tmp_path).succeeded()
    required = ("compile.enabled=true", "compile.require_cached=true")
    shardwise("train", recipe, *kept, *required, *ONE, at=tmp_path).succeeded()
    (event,) = metrics(tmp_path / "run", "compile")
    assert event["misses"] == 0
    shardwise("train", recipe, *kept[1:], "--nproc", "1", "--run-dir", "eager", at=tmp_path).succeeded()
    compiled, eager = ([each["loss"] for each in metrics(tmp_path / run, "step")] for run in ("run", "eager"))
    assert compiled == pytest.approx(eager, rel=1e-3), "in mixed precision a compiler rounds less often"


def test_bitwise_training_has_the_same_bits_again_and_on_two(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    # So wide and long that attention takes the kernels of real trainings.
    sizes = ("model.hidden_size=128", "model.max_position_embeddings=256", "train.sequence_length=256")
    keys = ("train.bitwise=true", "parallel.grain=2", "log.state_hash_every=2", *sizes)
    layouts = {"one": ("--nproc", "1"), "again": ("--nproc", "1")}
    if device_count(pytestconfig.getoption("--device")) >= 2:
        layouts["two"] = ("--nproc", "2", "parallel.tensor=2", "parallel.sequence=true")
    for run, options in layouts.items():
        shardwise("train", miniature(tmp_path), *keys, *options, "--run-dir", run, at=tmp_path).succeeded()

    def numbers(run: str) -> list[tuple[object, ...]]:
        return [(event["step"], event["loss"], event["grad_norm"]) for event in metrics(tmp_path / run, "step")]

    def hashes(run: str) -> list[object]:
        return [event["hash"] for event in metrics(tmp_path / run, "state_hash")]

    assert len(hashes("one")) == 2
    for run in layouts:
        assert numbers(run) == numbers("one"), run
        assert hashes(run) == hashes("one"), run
