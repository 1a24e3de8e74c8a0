"""ZeRO-1 beside Hugging Face Accelerate: `torchrun --nproc_per_node=2 accelerate_zero1.py`, or without torchrun.

Accelerate joins the processes, cuts the data and scales the backward pass. The model and the optimizer are not given to
`prepare`: Accelerate would wrap the model in DistributedDataParallel, which reduces every gradient by itself, and
ZeroRedundancyOptimizer, whose step() reduces them, refuses such a model. `accelerator.clip_grad_norm_` would see the
gradients of one process alone: max_norm of the optimizer replaces it.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from shardwise import ZeroRedundancyOptimizer

STEPS, BATCH = 40, 16


def main() -> None:
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())  # else it does not join processes on CPUs
    torch.manual_seed(0)  # the same weights in every process
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(accelerator.device)
    # Before: optimizer = torch.optim.AdamW(model.parameters(), lr=0.01), and prepare(model, optimizer, loader)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, max_norm=1.0)
    inputs = torch.randn(STEPS * BATCH, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    # Accelerate gives each process whole batches of this size: together they have BATCH samples a step.
    loader = accelerator.prepare(DataLoader(data, batch_size=BATCH // accelerator.num_processes))
    for some_inputs, some_targets in loader:
        loss = torch.nn.functional.mse_loss(model(some_inputs), some_targets)
        accelerator.backward(loss)
        optimizer.step()  # averages the gradients over the processes, clips, and updates this one's part
        optimizer.zero_grad()
    final = torch.nn.functional.mse_loss(model(inputs.to(accelerator.device)), data.tensors[1].to(accelerator.device))
    state = sum(optimizer.state_bytes().values())
    accelerator.print(f"final loss {final.item():.6f}; this process keeps {state:,} bytes of AdamW's state")
    accelerator.end_training()


if __name__ == "__main__":
    main()
