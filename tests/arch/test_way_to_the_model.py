"""The way from the command to the model is short: a reader follows few functions through few files."""

import signal
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import shardwise
from shardwise.cli import main
from shardwise.launch.stop_requests import SIGNALS
from shardwise.models.causal import CausalLM

PACKAGE = Path(shardwise.__file__).parent
MOST_FRAMES, MOST_FILES = 7, 4
SHORT = ["train.steps=2", "train.global_batch=2", "train.eval_every=0", "log.sample_tokens=0", "log.tensorboard=false"]


@pytest.fixture
def _as_before() -> Iterator[None]:
    """A run in this process hears signals; afterwards pytest does again."""
    handlers, threads = {number: signal.getsignal(number) for number in SIGNALS}, torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_as_before")
def test_from_the_command_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are this package's frames, from the command's `run` to the one that calls the model, and not torch's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.cli.train.accelerators", lambda: ("cpu", 0))
    ways: list[list[tuple[str, str]]] = []

    def note(module: torch.nn.Module, _: object) -> None:
        if isinstance(module, CausalLM):
            stack = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()]
            ours = [(file.relative_to(PACKAGE).as_posix(), name) for file, name in stack if PACKAGE in file.parents]
            ways.append(ours[ours.index(("cli/train.py", "run")) :])

    hook = register_module_forward_pre_hook(note)
    try:
        assert main(["train", "llama2-tiny", *SHORT, "--nproc", "1", "--run-dir", "run"]) == 0
    finally:
        hook.remove()
    assert len(ways) > 1
    for way in ways:
        assert len(way) <= MOST_FRAMES, way
        assert len({file for file, _ in way}) <= MOST_FILES, way
