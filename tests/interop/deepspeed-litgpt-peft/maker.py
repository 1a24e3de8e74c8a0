"""One maker trains or saves a tiny Llama: `torchrun … maker.py KIND BASE FOLDER`; its logits go to FOLDER-logits.pt."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

kind, base, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
IDS = torch.arange(24).view(2, 12)


def deepspeed(stage: int) -> Any:
    """ZeRO saves what it has trained for three steps."""
    import deepspeed

    model = LlamaForCausalLM.from_pretrained(base)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    for _ in range(3):
        engine.backward(engine(input_ids=IDS, labels=IDS).loss)
        engine.step()
    engine.save_checkpoint(str(folder))
    return engine


def litgpt() -> Any:
    """What `litgpt pretrain` saves: model and optimizer, with the files of --tokenizer_dir."""
    import lightning
    from litgpt import GPT, Config
    from litgpt.utils import copy_config_files, save_config

    config = Config.from_name(
        "Llama-2-7b-hf", n_layer=2, n_head=4, n_query_groups=2, n_embd=64, intermediate_size=96, head_size=16,
        block_size=64, padded_vocab_size=256, vocab_size=256, norm_eps=1e-6, rope_base=10000,
    )  # fmt: skip
    fabric = lightning.Fabric(devices=1, accelerator="cpu")
    model = fabric.setup(GPT(config))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    folder.mkdir()
    fabric.save(folder / "lit_model.pth", {"model": model, "optimizer": optimizer, "iter_num": 1, "step_count": 1})
    copy_config_files(Path(base), folder)
    save_config(config, folder)
    return model


def peft() -> Any:
    from peft import LoraConfig, get_peft_model

    model = LlamaForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder)
    return adapted


def accelerate() -> Any:
    """What `accelerate.utils.save_fsdp_model` does with sharded states."""
    import torch.distributed.checkpoint as dcp

    model = LlamaForCausalLM.from_pretrained(base)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    return model


torch.manual_seed(3)
if kind.startswith("zero"):
    model = deepspeed(int(kind.removeprefix("zero")))
else:
    model = {"litgpt": litgpt, "peft": peft, "accelerate": accelerate}[kind]()
    model.eval()
with torch.no_grad():
    outputs = model(IDS)
rank = dist.get_rank() if dist.is_initialized() else 0
if rank == 0:
    torch.save(getattr(outputs, "logits", outputs), f"{folder}-logits.pt")
