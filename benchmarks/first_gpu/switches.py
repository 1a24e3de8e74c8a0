"""What does each of `train.switches` gain over the same step without it, and what did the planner predict?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from first_gpu.session import Figures, Session
from first_gpu.timing import timed
from first_gpu.training import Setting, steps_of
from shardwise.config import Config, check_layout, load_config
from shardwise.layers.loss import chunk_losses, linear_cross_entropy
from shardwise_plan.device_specs import parse_cluster
from shardwise_plan.step_time import StepTime, shardwise_traits, step_time

TITLE = "Switches"
NOTE = (
    "Compiled steps without clipping, which all rows have in common, from the same weights; gain: speed over that of "
    "the step without a switch, less 1. Predicted: by the planner for one H200. Losses agree: within 1e-5, relative. "
    "Head: its loss and gradients alone, of one micro-batch of 2."
)
COLUMNS = "switch micro_batches predicted_gain gain step_ms ms mfu losses_agree peak_allocated"
NONE = "none"


@dataclass(frozen=True)
class Switch:
    """A switch of `train.switches`, with what it needs and the seconds that the planner expects it to save."""

    name: str
    needs: str
    saved: Callable[[Config, StepTime], float]


def _by_flash_attention_3(config: Config, step: StepTime) -> float:
    """Its times beside cuDNN's (arXiv:2407.08608, figures 5 and 6: heads of 128, 4k tokens, TFLOP/s on H100)."""
    forward = 0.25  # two products of seven, at a higher rate (benchmarks/results/first_gpu.md)
    return step.attention * (1 - forward * 609 / 638 - (1 - forward) * 499 / 542)


def _by_update_in_backward(config: Config, step: StepTime) -> float:
    """At most: AdamW and the copy of masters are 34 of the 42 bytes of a parameter, and all could be hidden."""
    return step.optimizer * 34 / 42


def _by_cuda_graphs(config: Config, step: StepTime) -> float:
    on = parse_cluster("h200:1")
    program = replace(shardwise_traits(config, on), graphs=True)
    graphs = step_time(config, check_layout(config, 1), on, program)
    assert graphs is not None
    micro_batches = config.train.global_batch // config.train.micro_batch
    return (step.total - graphs.total) * (1 - 1 / micro_batches)  # the last one of a step is not replayed


SWITCHES = (
    Switch("flash_attention_3", "torch 2.11 and the module flash_attn_interface", _by_flash_attention_3),
    Switch("update_in_backward", "optimizer.max_norm=null", _by_update_in_backward),
    Switch("cuda_graphs", "CUDA, one rank a replica", _by_cuda_graphs),
)


def predicted(config: Config, names: tuple[str, ...]) -> float:
    """The gain of some switches together: speed over that without them, less 1."""
    step = step_time(config, check_layout(config, 1), parse_cluster("h200:1"))
    assert step is not None
    return step.total / (step.total - sum(s.saved(config, step) for s in SWITCHES if s.name in names)) - 1


def published() -> dict[str, float]:
    """The predictions for the step of docs/performance.md: 8 blocks of Llama 2 7B, 16 micro-batches of 2."""
    keys = ["parallel.tensor=1", "parallel.sequence=false", "model.num_hidden_layers=8", "compile.enabled=true"]
    keys += ["train.micro_batch=2", "train.global_batch=32", "precision.mode=mixed", "optimizer.max_norm=null"]
    config = load_config("llama2-7b", keys)
    names = [(switch.name,) for switch in SWITCHES]
    together = tuple(switch.name for switch in SWITCHES)
    return {"all": predicted(config, together), **{name: predicted(config, (name,)) for (name,) in names}}


def run(session: Session) -> None:
    order = sorted(SWITCHES, key=lambda switch: -published()[switch.name])
    for name in (NONE, *(switch.name for switch in order)):
        session.measure({"switch": name}, lambda name=name: _steps(session, name))
    for program in ("shardwise", "torch's linear_cross_entropy"):
        session.measure({"switch": f"head by {program}"}, lambda program=program: _head(session, program))


def _steps(session: Session, name: str) -> Iterator[Figures]:
    keys = ["optimizer.max_norm=null", *([] if name == NONE else [f"train.switches=[{name}]"])]
    setting = Setting(True, "none", 2, keys=tuple(keys))
    torch.manual_seed(0)  # the same weights
    try:
        for figures in steps_of(session, setting, session.sizes.micro_batches):
            count = figures["micro_batches"]
            found = {**figures, "predicted_gain": predicted(setting.config(session, count), (name,))}
            for plain in session.written({"switch": NONE, "micro_batches": count}):
                found["gain"] = plain["step_ms"] / figures["step_ms"] - 1
                found["losses_agree"] = abs(figures["loss"] - plain["loss"]) <= 1e-5 * abs(plain["loss"])
            yield found
    finally:
        if name == "flash_attention_3" and session.device.type == "cuda":
            torch.nn.attention.restore_flash_attention_impl()
            torch.backends.cuda.enable_cudnn_sdp(True)


def _head(session: Session, program: str) -> Figures:
    """Loss and gradients of the output head, as our compiled model has them, or by torch, as 2.13 has it."""
    sizes = session.sizes
    x = session.random(sizes.sequence, 2, sizes.hidden).requires_grad_()
    weight = session.random(sizes.vocabulary, sizes.hidden, std=0.02).requires_grad_()
    targets = torch.randint(sizes.vocabulary, (sizes.sequence, 2), device=session.device)
    backend = dict(key.split("=") for key in session.compile_keys(True)).get("compile.backend", "inductor")
    torch.compiler.reset()
    losses = torch.compile(lambda logits, *rest: chunk_losses(logits.clone(), *rest), dynamic=False, backend=backend)

    def both() -> None:
        if program == "shardwise":
            loss = linear_cross_entropy(x, weight, targets, losses=losses)
        else:
            chunks = torch.nn.LinearCrossEntropyOptions()
            loss = F.linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), reduction="sum", options=chunks)
        loss.backward()
        x.grad = weight.grad = None

    return timed(session, [both])
