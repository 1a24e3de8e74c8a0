"""How fast is transformers' Llama on the same blocks and the same card, and how much memory does it take?"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from first_gpu.session import Figures, Session
from first_gpu.training import Setting, steps_of
from shardwise.distributed import devices
from shardwise.estimates.device_peaks import peak_flops
from shardwise.models.flops import flops_per_token

TITLE = "Beside another program"
NOTE = (
    "transformers: its Llama with torch's attention, float32 weights under `torch.autocast` to bfloat16 as its Trainer "
    "has them, fused AdamW, clipping, the loss of each token. Blocks, tokens and micro-batches are those of shardwise."
)
COLUMNS = "program micro_batch micro_batches step_ms tokens_per_second mfu peak_allocated loss"
_ROUNDS = 3


def run(session: Session) -> None:
    for is_compiled in (True, False):
        setting = Setting(is_compiled, "none", 2)
        program = "compiled" if is_compiled else "eager"
        labels = {"program": f"shardwise, {program}", "micro_batch": 2}
        session.measure(labels, lambda setting=setting: steps_of(session, setting, session.sizes.micro_batches[1:]))
        labels = {"program": f"transformers, {program}", "micro_batch": 2}
        session.measure(labels, lambda setting=setting: _theirs(session, setting))


def _theirs(session: Session, setting: Setting) -> Figures:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = session.sizes
    count = sizes.micro_batches[1]
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.blocks,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=sizes.sequence,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with session.device:
        model: Any = LlamaForCausalLM(config).train()
    if setting.is_compiled:
        torch.compiler.reset()
        keys = dict(key.removeprefix("compile.").split("=") for key in session.compile_keys(True))
        model.compile(backend=keys.get("backend", "inductor"))
    fused = session.device.type in ("cuda", "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    shape = (count, setting.micro_batch, sizes.sequence)
    ids = torch.randint(sizes.vocabulary, shape, device=session.device)

    def step() -> float:
        total = torch.zeros((), device=session.device)
        for batch in ids:
            with torch.autocast(session.device.type, dtype=torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    step()
    seconds = []
    for _ in range(_ROUNDS):
        devices.synchronize(session.device)
        start = time.perf_counter()
        loss = step()
        devices.synchronize(session.device)
        seconds.append(time.perf_counter() - start)
    rate = ids.numel() / median(seconds)
    own = setting.config(session, count)
    peak, flops = peak_flops(devices.name(session.device), "bfloat16"), flops_per_token(own.model, sizes.sequence)
    return {
        "micro_batches": count,
        "step_ms": 1000 * median(seconds),
        "tokens_per_second": rate,
        "mfu": rate * flops / peak if peak and flops else None,
        "loss": loss,
    }
