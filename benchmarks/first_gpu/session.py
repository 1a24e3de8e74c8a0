"""One process on one device: sizes, the time that is left, and a line of JSON for each configuration.

Shapes in all modules of this folder: S sequence, B batch, T = S·B tokens, H hidden, F width of the MLP, n heads of
width d.
"""

from __future__ import annotations

import gc
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise.base.errors import RAISED
from shardwise.config import Config, load_config
from shardwise.data.formats.prepared_data import PreparedData, random_tokens
from shardwise.distributed import devices, placement

Figures = dict[str, Any]
Item = TypeVar("Item")
_SMALL = 2**26
"""Bytes that may stay on the device between two configurations."""
_AGAIN = 5.0
"""Seconds until a question whose time is over is told so once more."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of all questions.

    Attributes:
        blocks: blocks of the trainings; every configuration must fit.
        tokens: rows of the matrix products.
        elements: parameters of the optimizer's update.
        copied: bytes of the copy that measures the bandwidth.
        square: rows of the square matrix product.
        seconds: time of a measurement.
        micro_batches: micro-batches of a step, short and long.
    """

    hidden: int = 4096
    mlp: int = 11008
    heads: int = 32
    vocabulary: int = 32000
    sequence: int = 4096
    blocks: int = 8
    tokens: tuple[int, ...] = (4096, 8192, 16384)
    elements: int = 10**9
    copied: int = 4 * 2**30
    square: int = 8192
    seconds: float = 0.15
    micro_batches: tuple[int, int] = (4, 16)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def keys(self) -> list[str]:
        """Keys of Llama 2 7B's recipe that give the model these sizes."""
        return [
            f"model.hidden_size={self.hidden}",
            f"model.intermediate_size={self.mlp}",
            f"model.num_attention_heads={self.heads}",
            f"model.num_key_value_heads={self.heads}",
            f"model.vocab_size={self.vocabulary}",
            f"model.max_position_embeddings={self.sequence}",
            f"train.sequence_length={self.sequence}",
        ]


TINY = Sizes(128, 192, 8, 256, 32, 2, (32,), 2**15, 2**16, 64, 0.001, (2, 3))


class TimeIsOver(BaseException):
    """The time of a question is over. No `except Exception` of a library catches it."""


class Session:
    """Measures configurations of one question after the other, and writes what was found.

    Attributes:
        device: the device.
        is_tiny: True for tiny shapes, which take seconds on any device.

    Args:
        folder: gets `lines.jsonl`, and `errors.txt` with the whole of each error.
    """

    def __init__(self, device: torch.device, folder: Path, *, is_tiny: bool) -> None:
        self.device = device
        self.is_tiny = is_tiny
        self.sizes = TINY if is_tiny else Sizes()
        self._file = folder / "lines.jsonl"
        self._errors = folder / "errors.txt"
        self._question = ""
        self._answered: list[Figures] = []

    @contextmanager
    def asking(self, question: str, seconds: float) -> Iterator[None]:
        """Inside, lines belong to a question, which stops after so many seconds."""
        self._question = question
        self._keep_answers()
        before = signal.signal(signal.SIGALRM, _time_is_over)
        # Again and again: Python drops an exception that is raised in a destructor.
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), _AGAIN)
        try:
            yield
        except TimeIsOver:
            _end_alarm()
            self.write({"stopped": f"after {seconds:.0f} s, its share of the time"})
        except RAISED as error:
            self._write_error({}, error)
        finally:
            _end_alarm()
            signal.signal(signal.SIGALRM, before)
            self.release()

    def _keep_answers(self) -> None:
        """Forget what an earlier session wrote of answers of this question that it did not finish."""
        texts = self._file.read_text().splitlines() if self._file.exists() else []
        lines = [json.loads(text) for text in texts if text.endswith("}")]  # the last one may be cut off
        own = [line for line in lines if line["question"] == self._question]
        self._answered = [line["answered"] for line in own if "answered" in line]
        kept = [line for line in lines if line not in own or "answered" in line or self._is_answered(line)]
        self._file.write_text("".join(f"{json.dumps(line)}\n" for line in kept))

    def _is_answered(self, line: Figures) -> bool:
        return any(labels.items() <= line.items() for labels in self._answered)

    def few(self, items: Sequence[Item], count: int = 2) -> Sequence[Item]:
        """All items, or the first of them for tiny shapes."""
        return items[:count] if self.is_tiny else items

    def measure(self, labels: Figures, function: Callable[[], Figures | Iterator[Figures]]) -> None:
        """Write what a function returns, or each that it yields, with its labels and the peak of memory; or its error.

        An error ends this configuration alone: its memory is released before the next one. What an earlier session has
        answered, with figures or an error, is not measured again.
        """
        labels = json.loads(json.dumps(labels, default=str))
        if self._is_answered(labels):
            return
        start = time.monotonic()
        self._reset_peak()
        try:
            found = function()
            for figures in [found] if isinstance(found, dict) else found:
                taken = {"seconds": round(time.monotonic() - start, 2)}
                self.write({**labels, **figures, **self._peak(), **taken})
                start = time.monotonic()
                self._reset_peak()
            self.write({"answered": labels})
        except TimeIsOver as error:
            _end_alarm()
            traceback.clear_frames(error.__traceback__)
            self.write({**labels, "error": "the time of the question was over"})
            raise TimeIsOver from None
        except RAISED as error:
            self._write_error(labels, error)
            self.write({"answered": labels})
        finally:
            self.release()

    def written(self, labels: Figures) -> list[Figures]:
        """The lines of this question with these labels, of earlier sessions too."""
        lines = [json.loads(text) for text in self._file.read_text().splitlines()]
        return [line for line in lines if line["question"] == self._question and labels.items() <= line.items()]

    def write(self, line: Figures) -> None:
        text = json.dumps({"question": self._question, **line}, default=str)
        with self._file.open("a") as file:
            file.write(text + "\n")
        if "answered" not in line:
            print(text[:400], flush=True)

    def _write_error(self, labels: Figures, error: BaseException) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        first_line = str(error).strip().partition("\n")[0][:300]
        with self._errors.open("a") as file:
            file.write(f"{self._question} {labels}\n{''.join(traceback.format_exception(error))}\n")
        traceback.clear_frames(error.__traceback__)
        where = f"{Path(place.filename).name}:{place.lineno}"
        self.write({**labels, "error": f"{type(error).__name__}: {first_line}", "where": where})

    def release(self) -> None:
        """Give freed memory back to the device."""
        if self.device.type == "cpu" or not self.works():
            return
        # A collection takes long in a process that has compiled.
        if torch.accelerator.memory_allocated(self.device) > _SMALL:
            gc.collect()
        torch.accelerator.empty_cache()

    def works(self) -> bool:
        """True if the device still computes: after some errors, no later call in the process succeeds."""
        try:
            devices.synchronize(self.device)
            return torch.ones(2, device=self.device).sum().item() == 2
        except RAISED:
            return False

    def _reset_peak(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)

    def _peak(self) -> Figures:
        found = devices.allocator_bytes(self.device)
        return {f"peak_{kind}": found[f"most_{kind}"] for kind in ("allocated", "reserved") if found}

    # ---- configurations of Llama 2 7B

    def config(self, *keys: str, blocks: int | None = None) -> Config:
        """Llama 2 7B at this session's sizes on one device; keys that come later count."""
        own = ["parallel.tensor=1", "parallel.sequence=false", "train.global_batch=4"]
        own.append(f"model.num_hidden_layers={blocks or self.sizes.blocks}")
        return load_config("llama2-7b", [*own, *self.sizes.keys(), *keys])

    def compile_keys(self, is_compiled: bool) -> list[str]:
        """Keys that compile; without a GPU, tiny shapes are only captured, as code for a CPU takes long to compile."""
        keys = [f"compile.enabled={str(is_compiled).lower()}"]
        if is_compiled and self.is_tiny and self.device.type != "cuda":
            keys.append("compile.backend=aot_eager")
        return keys

    @cached_property
    def text(self) -> PreparedData:
        return random_tokens(self.sizes.vocabulary, 8 * self.sizes.micro_batches[-1] + 1, self.sizes.sequence)

    def random(self, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal numbers on the device."""
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(0.0, std)


def _time_is_over(*_: object) -> None:
    raise TimeIsOver


def _end_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextmanager
def weights_drawn_on_device() -> Iterator[None]:
    """Inside, initial weights are drawn by the device, in milliseconds: other numbers than those of a training."""
    drawn_on_cpu = placement.initialize_

    @torch.no_grad()
    def draw(parameter: torch.Tensor, record: placement.Placement, seed: int) -> None:
        for piece in record.pieces:
            part = piece.of(parameter)
            if piece.init.kind == "constant":
                part.fill_(piece.init.value)
            else:
                part.normal_(0.0, piece.init.std)

    placement.initialize_ = draw
    try:
        yield
    finally:
        placement.initialize_ = drawn_on_cpu
