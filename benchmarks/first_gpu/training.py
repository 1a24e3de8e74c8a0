"""How fast does shardwise's own trainer train blocks of Llama 2 7B, and how much memory does it take?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from device import ROOM

from first_gpu.session import Figures, Session, weights_drawn_on_device
from first_gpu.timing import Clocks
from shardwise.config import Config, check_layout
from shardwise.distributed import devices
from shardwise.distributed.mesh import Mesh
from shardwise.estimates.device_peaks import peak_flops
from shardwise.estimates.memory import expected_memory
from shardwise.models.flops import flops_per_token
from shardwise.train.build import build_trainer
from shardwise.train.feed import Feed
from shardwise.train.trainer import Trainer
from shardwise_plan.device_specs import parse_cluster
from shardwise_plan.step_time import step_time

TITLE = "Training"
NOTE = (
    "Steps of shardwise's trainer: embedding, blocks of Llama 2 7B at its width, head, AdamW; 4,096 tokens a sequence, "
    "mixed precision, with fp8 products where the program says so, initial weights drawn by the device. MFU: model "
    "FLOPs without recompute, the causal half of attention counted, over the published dense bfloat16 peak. Expected: "
    "by `shardwise.estimates` from data sheets."
)
COLUMNS = (
    "program recompute blocks micro_batch micro_batches step_ms "
    "expected_ms tokens_per_second mfu peak_allocated expected_memory peak_reserved first_step_seconds"
)
_KNOWN = ("H100", "H200", "B200", "A100")


@dataclass(frozen=True)
class Setting:
    """A configuration of the trainer, but for the number of micro-batches."""

    is_compiled: bool
    recompute: str
    micro_batch: int
    in_fp8: bool = False
    keys: tuple[str, ...] = ()

    @property
    def labels(self) -> Figures:
        program = ("compiled" if self.is_compiled else "eager") + (", fp8" if self.in_fp8 else "")
        return {"program": program, "recompute": self.recompute, "micro_batch": self.micro_batch}

    def config(
        self, session: Session, micro_batches: int, blocks: int | None = None, keys: Sequence[str] = ()
    ) -> Config:
        return session.config(
            f"train.micro_batch={self.micro_batch}",
            f"train.global_batch={self.micro_batch * micro_batches}",
            f"train.recompute={self.recompute}",
            *(["precision.matmul=fp8"] if self.in_fp8 else []),
            *session.compile_keys(self.is_compiled),
            *self.keys,
            *keys,
            blocks=blocks,
        )


SETTINGS = [
    *(Setting(*s) for s in ((False, "none", 1), (True, "none", 1), (True, "none", 2), (False, "none", 2))),
    *(Setting(*s) for s in ((False, "selective", 1), (True, "selective", 1))),
    *(Setting(*s) for s in ((False, "selective", 2), (True, "selective", 2))),
]
"""In order of value."""
_FULL_DEVICE_AFTER = 4
"""Number of settings before the one with as many blocks as fit, which needs the graphs of the second."""


def run(session: Session) -> None:
    for number, setting in enumerate(session.few(SETTINGS, 3)):
        if number == _FULL_DEVICE_AFTER:
            session.measure(
                {**SETTINGS[1].labels, "fills_device": True},
                lambda: steps_of(session, SETTINGS[1], session.sizes.micro_batches[:1], fitting(session, SETTINGS[1])),
            )
        session.measure(setting.labels, lambda setting=setting: steps_of(session, setting, session.sizes.micro_batches))


def build(session: Session, config: Config) -> Trainer:
    """The trainer of a configuration on this device."""
    if config.compile.enabled:
        torch.compiler.reset()  # else graphs of earlier trainers count as recompilations
    with weights_drawn_on_device():
        return build_trainer(config, Mesh(device=session.device), session.text)


def fitting(session: Session, setting: Setting) -> int:
    """The largest number of blocks whose expected memory is within `ROOM` of the device's."""
    room = devices.total_memory(session.device)
    if room is None:
        return session.sizes.blocks + 1
    for blocks in range(32, 1, -1):
        config = setting.config(session, session.sizes.micro_batches[0], blocks)
        if _expected_bytes(config) <= ROOM * room:
            return blocks
    return 1


def steps_of(
    session: Session, setting: Setting, counts: tuple[int, ...], blocks: int | None = None
) -> Iterator[Figures]:
    """Yield the figures of steps of so many micro-batches, one number after the other."""
    trainer = build(session, setting.config(session, counts[0], blocks))
    start = time.perf_counter()
    trainer.step()
    devices.synchronize(session.device)
    first = {"first_step_seconds": time.perf_counter() - start}
    for micro_batches in counts:
        config = setting.config(session, micro_batches, blocks)
        trainer.feed.close()
        trainer.config = config
        trainer.feed = Feed.open(config, trainer.mesh, session.text)
        is_short = micro_batches == counts[0]
        if is_short:
            trainer.step()
        found = timed_steps(session, trainer, rounds=4 if is_short else 2)
        yield {**found, **first, "blocks": config.model.num_hidden_layers, "micro_batches": micro_batches}
    trainer.feed.close()


def timed_steps(session: Session, trainer: Trainer, rounds: int) -> Figures:
    config = trainer.config
    seconds = []
    with Clocks(session.device) as clocks:
        for _ in range(rounds):
            devices.synchronize(session.device)
            start = time.perf_counter()
            loss = trainer.step().loss
            devices.synchronize(session.device)
            seconds.append(time.perf_counter() - start)
    step = median(seconds)
    length = config.train.sequence_length
    rate = config.train.global_batch * length / step
    peak = peak_flops(devices.name(session.device), "bfloat16")
    flops = flops_per_token(config.model, length)
    return {
        "step_ms": 1000 * step,
        "spread": (max(seconds) - min(seconds)) / step,
        "tokens_per_second": rate,
        "mfu": rate * flops / peak if peak and flops else None,
        "loss": loss,
        "expected_memory": _expected_bytes(config),
        "expected_ms": _expected_ms(session, config),
        **clocks.figures(),
    }


def _expected_bytes(config: Config) -> int:
    expected = expected_memory(config, check_layout(config, 1), accelerator=True)
    assert expected is not None, "the model is shardwise's own"
    return expected.total


def _expected_ms(session: Session, config: Config) -> float | None:
    """The planner's time of a step; None for a device that it does not know."""
    name = next((name for name in _KNOWN if name in devices.name(session.device)), None)
    if name is None:
        return None
    time_of_step = step_time(config, check_layout(config, 1), parse_cluster(f"{name.lower()}:1"))
    return None if time_of_step is None else 1000 * time_of_step.total
