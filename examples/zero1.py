"""ZeRO-1 in a training script of your own: `torchrun --nproc_per_node=2 zero1.py`, or `python zero1.py`.

Each process trains on its part of the batch and keeps its part of AdamW's state; the final loss does not depend on how
many there are.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import Mesh, ZeroRedundancyOptimizer

STEPS, BATCH, LENGTH, VOCABULARY = 60, 16, 8, 32


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 48), nn.Flatten(), nn.Linear(48 * LENGTH, 64), nn.GELU(), nn.Linear(64, VOCABULARY)
    )


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count by a stride of their own, and the number that comes next."""
    generator = torch.Generator().manual_seed(step)
    start, stride = torch.randint(VOCABULARY, (2, BATCH, 1), generator=generator)
    numbers = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return numbers[:, :-1], numbers[:, -1]


def main() -> None:
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = Mesh().device  # the accelerator of this process, or the CPU
    torch.manual_seed(0)
    model = make_model().to(device)
    # Before: optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # After:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
    for step in range(STEPS):
        inputs, targets = (tensor.to(device) for tensor in make_batch(step))
        logits = model(inputs[rank::ranks])
        # step() averages the gradients over the processes, and one may have more sequences than another. By this factor
        # each sequence weighs 1 / BATCH, as in one process; a mean over each process's own sequences would weigh them
        # differently.
        loss = nn.functional.cross_entropy(logits, targets[rank::ranks], reduction="sum") * ranks / BATCH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        inputs, targets = (tensor.to(device) for tensor in make_batch(STEPS))
        final = float(nn.functional.cross_entropy(model(inputs), targets))
    if rank == 0:
        print(f"final loss {final:.5f}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
