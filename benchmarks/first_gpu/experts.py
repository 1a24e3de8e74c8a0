"""How fast are the grouped products of experts, beside those of transformers?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from first_gpu.session import Figures, Session
from first_gpu.timing import tflops, timed
from shardwise.layers.experts import sum_of_experts

TITLE = "Experts of one block"
NOTE = (
    "OLMoE's 64 experts of width 1,024, 8 a token, in bfloat16, forward and backward, without router and "
    "communication. TFLOP/s of the products alone."
)
COLUMNS = "program tokens ms tflops peak_allocated"
_EXPERTS, _PER_TOKEN = 64, 8
_THEIRS = ("grouped_mm", "batched_mm")


def run(session: Session) -> None:
    programs = ["shardwise", *(f"transformers, {name}" for name in session.few(_THEIRS, 1))]
    for tokens in session.few(session.sizes.tokens, 1):
        for program in programs:
            labels = {"program": program, "tokens": tokens}
            session.measure(labels, lambda program=program, tokens=tokens: _experts(session, program, tokens))


def _experts(session: Session, program: str, tokens: int) -> Figures:
    hidden, width = session.sizes.hidden // 2, session.sizes.hidden // 4
    x, dy = session.random(tokens, hidden), session.random(tokens, hidden)
    weights, experts = session.random(tokens, _EXPERTS, dtype=torch.float32).softmax(-1).topk(_PER_TOKEN)
    weights = weights.to(x.dtype)
    gate_up, down = (
        session.random(_EXPERTS, 2 * width, hidden, std=0.02),
        session.random(_EXPERTS, hidden, width, std=0.02),
    )
    inputs = [tensor.requires_grad_() for tensor in (x, weights, gate_up, down)]
    call = _program(program, hidden, width, experts)

    def both() -> None:
        call(*inputs).backward(dy)
        for tensor in inputs:
            tensor.grad = None

    found = timed(session, [both])
    return {**found, "tflops": tflops(3 * 2 * 3 * tokens * _PER_TOKEN * hidden * width, found["ms"])}


def _program(program: str, hidden: int, width: int, experts: Tensor) -> Callable[..., Tensor]:
    if program == "shardwise":
        return lambda x, weights, gate_up, down: sum_of_experts(x, weights, experts, gate_up, down)
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    config = OlmoeConfig(
        hidden_size=hidden, intermediate_size=width, num_experts=_EXPERTS, num_experts_per_tok=_PER_TOKEN
    )
    config._experts_implementation = program.rpartition(" ")[2]
    module = OlmoeExperts(config)

    def call(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        given = {"gate_up_proj": gate_up, "down_proj": down}
        result: Tensor = torch.func.functional_call(module, given, (x, experts, weights))
        return result

    return call
