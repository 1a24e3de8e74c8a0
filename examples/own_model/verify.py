"""Does sharded.py train as plain.py does? Both start from the same weights and see the same batch.

Alone: `python verify.py`. Cut: `torchrun --nproc_per_node=4 verify.py 2` is TP 2 with sequence parallelism × DP 2.
"""

import sys

import torch
import torch.distributed as dist
from plain import Decoder as Plain
from sharded import Decoder as Sharded

from shardwise import Mesh, ZeroRedundancyOptimizer, canonical_tensors

SIZES = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
mesh = Mesh(tensor=int(sys.argv[1]) if len(sys.argv) > 1 else 1, device="cpu")
torch.manual_seed(0)
sharded = Sharded(
    **SIZES,
    group=mesh.tp,
    sequence_parallel=mesh.tp.size > 1 and "no-sp" not in sys.argv,
)
plain = Plain(**SIZES)
for matrix in (
    parameter for parameter in sharded.parameters() if parameter.dim() > 1
):
    matrix.data.mul_(
        3
    )  # small weights hide a different activation function: near zero all are alike
starts = {
    name: whole.clone() for name, whole in canonical_tensors(sharded)
}  # plain.py's names, whole tensors
plain.load_state_dict(starts)
tokens = torch.randint(SIZES["vocab_size"], (8, 33))
ids, targets = tokens[:, :-1], tokens[:, 1:]
mine = slice(
    mesh.dp.rank, None, mesh.dp.size
)  # this replica's part of the batch

# Not AdamW: it divides by the gradient's size, which hides a wrong factor and enlarges rounding errors near zero.
reference = torch.optim.SGD(plain.parameters(), lr=0.1)
optimizer = ZeroRedundancyOptimizer(
    sharded.parameters(),
    torch.optim.SGD,
    mesh=mesh,
    grad_clipping=False,
    lr=0.1,
)
worst = 0.0
for _ in range(10):
    wanted = plain(ids, targets)  # [batch, sequence] → the mean loss
    wanted.backward()
    reference.step()
    reference.zero_grad()

    loss = (
        sharded(ids[mine].t(), targets[mine].t()) / targets[mine].numel()
    )  # [sequence, batch] → the sum of losses
    loss.backward()
    optimizer.step()  # averages the gradients over the replicas
    optimizer.zero_grad()

    found = loss.detach().clone()
    if mesh.dp.size > 1:
        dist.all_reduce(found, group=mesh.dp.process_group)
    worst = max(worst, abs(found.item() / mesh.dp.size / wanted.item() - 1))

# A wrong gradient may hardly change the loss. It changes what the ten steps add to its weight.
ends, apart = plain.state_dict(), {}
changes = {
    name: (ends[name] - start).square().mean().sqrt()
    for name, start in starts.items()
}
# A gradient that is zero in exact arithmetic, as that of a key bias, is rounding errors alone.
least = 1e-3 * max(changes.values())
for name, whole in canonical_tensors(sharded):
    apart[name] = (
        (whole - ends[name]).square().mean().sqrt() / max(changes[name], least)
    ).item()
name = max(apart, key=apart.__getitem__)

if mesh.world.rank == 0:
    local, total = (
        sum(t.numel() for t in tensors)
        for tensors in (sharded.parameters(), starts.values())
    )
    print(
        f"{mesh}: {local:,} of {total:,} parameters, loss {wanted.item():.4f}, the two differ by at most {worst:.1e}"
    )
    print(
        f"the weight whose change differs most: {name}, by {apart[name]:.1e}"
    )
if dist.is_initialized():
    dist.destroy_process_group()
sys.exit(
    0
    if worst <= 1e-5 and apart[name] <= 2e-4
    else "the two models are not the same"
)
