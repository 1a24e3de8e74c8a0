"""Other launchers, from the command to the first step of a DDP training of llama2-tiny's model on the CPU.

Run as a program, this is a rank of them. The model is in plain torch, so that a rank imports torch alone (or accelerate
besides). Tokens are random: nothing is read, and no checkpoint or sample is made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
    "accelerate": (
        "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no",
        "--dynamo_backend", "no", "--main_process_port", "0", "--num_processes",
    ),
}  # fmt: skip
"""accelerate starts several ranks only with --multi_gpu; `Accelerator(cpu=True)` has them compute on the CPU."""
VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, LENGTH, BATCH = 512, 64, 176, 8, 4, 64, 8


def rows(ranks: int, timed: Callable[[Sequence[str], str], Any]) -> dict[str, Any]:
    """The results of `timed`, a function of a command and a pattern of the line of its first step, by launcher."""
    return {
        name: timed([sys.executable, *launcher, str(ranks), __file__, name], r"step +1/")
        for name, launcher in LAUNCHERS.items()
    }


def main(launcher: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
            self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
            self.gate_up = nn.Linear(HIDDEN, 2 * INNER, bias=False)
            self.down = nn.Linear(INNER, HIDDEN, bias=False)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            q, k = (one * cos + torch.cat((-one.chunk(2, -1)[1], one.chunk(2, -1)[0]), -1) * sin for one in (q, k))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
            return x + self.down(functional.silu(gate) * up)

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.RMSNorm(HIDDEN)
            self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            width = HIDDEN // HEADS
            rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
            angles = torch.outer(torch.arange(ids.shape[1]), rates).repeat(1, 2)
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x, angles.cos(), angles.sin())
            return self.head(self.norm(x))

    torch.manual_seed(1)
    model: nn.Module = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if launcher == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    else:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        backward = Tensor.backward
    ids = torch.randint(VOCABULARY, (BATCH // dist.get_world_size(), LENGTH + 1))
    loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    backward(loss)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step 1/1  loss {loss.item():.4f}", flush=True)
    # gloo may wait for ever for a rank that has closed its connections.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
