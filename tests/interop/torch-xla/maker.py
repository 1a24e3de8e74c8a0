"""Train a Llama with torch_xla's ZeroRedundancyOptimizer: `python maker.py FOLDER`, in an environment with torch_xla.

FOLDER has the batches (`batches.npy`) and settings.json; it gets losses.json, `plain` and `xser`, two checkpoints with
the names of neuronx-distributed. The class has all of its ranks in this process, one object for each, as XLA's CPU
client cannot be counted on to run two collectives at a time: sums and gathering are left to this program. Cutting,
padding, the steps, `state_dict` and the serialization are torch_xla's.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["PJRT_DEVICE"] = "CPU"

import numpy as np
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.utils.serialization as xser
import transformers
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer


def optimizers(model: Any, settings: dict[str, Any]) -> list[ZeroRedundancyOptimizer]:
    """One for each data-parallel rank; the groups are those of neuronx-distributed's scripts."""
    named = list(model.named_parameters())
    made = []
    for rank in range(settings["ranks"]):
        groups = [
            {"params": [p for n, p in named if not ("bias" in n or "norm" in n)], "weight_decay": 0.01},
            {"params": [p for n, p in named if "bias" in n or "norm" in n], "weight_decay": 0.0},
        ]
        made.append(
            ZeroRedundancyOptimizer(
                groups, torch.optim.AdamW, lr=settings["lr"], betas=(0.9, 0.95), grad_clipping=False, lazy_init=True,
                sharding_groups=[list(range(settings["ranks"]))], pin_layout=False,
                save_master_weights=settings["masters"],
            )
        )  # fmt: skip
        made[-1].global_rank = rank
        made[-1].init_zero()
    return made


def step(model: Any, made: list[ZeroRedundancyOptimizer]) -> None:
    """A clipped update of all ranks' shards, which are gathered then."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for each in made:
        each._sync_param_groups(each.param_groups, each.base_optimizer.param_groups)
        for group, shards in zip(each.param_groups, each.base_optimizer.param_groups, strict=True):
            for parameter, shard in zip(group["params"], shards["params"], strict=True):
                shard.grad = each._shard_tensor(parameter.grad)
        each.base_optimizer.step()
        each._sync_param_groups(each.base_optimizer.param_groups, each.param_groups)
    with torch.no_grad():
        for number, group in enumerate(made[0].param_groups):
            for place, parameter in enumerate(group["params"]):
                parts = [each.base_optimizer.param_groups[number]["params"][place] for each in made]
                parameter.copy_(torch.cat([part.detach() for part in parts])[: len(parameter)])
    model.zero_grad()
    torch_xla.sync()


def main(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    transformers.set_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings["model"])).to(torch_xla.device())
    made = optimizers(model, settings)
    schedulers = [
        transformers.get_linear_schedule_with_warmup(each, settings["warmup_steps"], settings["steps"]) for each in made
    ]
    losses = []
    for number, batch in enumerate(np.load(folder / "batches.npy")):
        if number == settings["before"]:
            for form in ("plain", "xser"):
                save(folder / form, form, model, made, schedulers[0], settings)
        ids = torch.from_numpy(batch).to(torch_xla.device())
        logits = model(input_ids=ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        step(model, made)
        for scheduler in schedulers:
            scheduler.step()
    (folder / "losses.json").write_text(json.dumps(losses))


def save(folder: Path, form: str, model: Any, made: list[Any], scheduler: Any, settings: dict[str, Any]) -> None:
    for name in ("model", "optim"):
        (folder / name).mkdir(parents=True)

    def write(value: Any, path: Path) -> None:
        if form == "xser":
            xser.save(value, str(path), master_only=False)
        else:
            torch.save(xm._maybe_convert_to_cpu(value), path)

    write(model.state_dict(), folder / "model/dp_rank_00_tp_rank_00_pp_rank_00.pt")
    for rank, each in enumerate(made):
        write(each.state_dict(), folder / f"optim/dp_rank_{rank:02d}_tp_rank_00_pp_rank_00.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    arguments = {
        "batch_size": 1, "grad_accum_usteps": 1, "max_steps": settings["steps"],
        "warmup_steps": settings["warmup_steps"], "seq_len": settings["length"],
    }  # fmt: skip
    torch.save({"global_step": settings["before"], "epoch": 0, "cli_args": arguments}, folder / "user_content.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
