# layers.py; run it with: torchrun --nproc_per_node=2 layers.py
import torch
import torch.distributed as dist

from shardwise import (
    ColumnParallelLinear,
    Mesh,
    RMSNorm,
    RowParallelLinear,
    ZeroRedundancyOptimizer,
)


class FeedForward(torch.nn.Module):
    """x [S/TP, B, 32] -> the same; both matmuls are cut over the group."""

    def __init__(self, group):
        super().__init__()
        shared = {"group": group, "seed": 1, "sequence_parallel_enabled": True}
        self.norm = RMSNorm(32, name="norm", **shared)
        column = {"gather_output": False, "name": "up", **shared}
        row = {"input_is_parallel": True, "name": "down", **shared}
        self.up = ColumnParallelLinear(32, 128, **column)
        self.down = RowParallelLinear(128, 32, **row)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


dist.init_process_group()
mesh = Mesh(tensor=2)
torch.set_default_device(mesh.device)
model = FeedForward(mesh.tp)
optimizer = ZeroRedundancyOptimizer(
    model.parameters(),
    torch.optim.AdamW,
    lr=0.01,
    mesh=mesh,
)

torch.manual_seed(0)
whole = torch.randn(8, 4, 32)  # [S, B, H], the same on both ranks
for _ in range(5):
    mine = whole.chunk(mesh.tp.size)[mesh.tp.rank]
    loss = model(mine).square().sum() / whole.numel()
    loss.backward()
    # It also sums gradients that sequence parallelism left partial:
    # of the norm's weight and of the row bias.
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
