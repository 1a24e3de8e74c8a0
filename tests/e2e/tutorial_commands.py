"""The commands of the tutorials at a size for tests. `python tutorial_commands.py NAME ARGUMENT…` is what NAME runs.

The pages' blocks are run as they are, by bash, with these in place of the commands of the same names:

    shardwise train   without --dry-run: the recipe with a model of 2 layers, TP 2, 2 steps, small batches, float32;
                      TP 1, in one process, where the page asks for ten steps or for LAMB, to save time
    torchrun          --nnodes=4 is 2 agents on this machine, --nproc_per_node=32 is 2 or 1; ports are free ones
    python -m         a script of scripts/ measures a smaller model, fewer layouts, and leaves the documentation alone
    tensorboard       --inspect: it says what it found, and ends
    make              -n: it says what it would do

All else (tail, grep, ls, …) is what it is, and so is `shardwise` with --dry-run or another command.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MODEL = ["model.hidden_size=64", "model.intermediate_size=128", "model.num_attention_heads=4"]
_TRAIN = ["train.global_batch=8", "train.micro_batch=2", "train.sequence_length=64", "train.stop_after=2"]
_LOG = ["log.sample_tokens=4", "log.tensorboard=false"]
_SMALL = ["model.vocab_size=512", "model.num_hidden_layers=2", "precision.mode=float32", *_LOG, *_TRAIN]
_TP2 = ["parallel.tensor=2"]
_PAIRS = ["data.max_predictions=10"]
RECIPES = {
    # its page opens TensorBoard
    "llama2-7b": [*_SMALL, *_MODEL, "model.num_key_value_heads=4", *_TP2, "log.tensorboard=true"],
    "gpt-neox-20b": [*_SMALL, *_MODEL, *_TP2],
    "gpt-neox-6.9b": [*_SMALL, *_MODEL, *_TP2],
    "bert-large": [*_SMALL, *_MODEL, *_PAIRS, *_TP2],
    "bert-large-phase2": [*_SMALL, *_MODEL, *_PAIRS, *_TP2],
    "gpt3-23b": [*_SMALL, *_MODEL, "model.num_hidden_layers=8", "parallel.tensor=1", "parallel.pipeline=2"],
    "gpt3-tiny": ["log.sample_tokens=4"],
    # an odd number of heads, as GPT-2 XL's
    "gpt2-xl": [*_SMALL, "model.hidden_size=80", "model.intermediate_size=320", "model.num_attention_heads=5"],
    "docs/tutorials/bert-mini.yaml": [*_SMALL, *_MODEL, *_PAIRS, "data.dataset=tiny"],
}
SCRIPTS = {
    "scripts.tutorial_bert": [
        *("--out", "measured", "--layouts", "DP 4", "--ranks", "2", "--rounds", "1"),
        *("model.vocab_size=512", "model.num_hidden_layers=1", *_MODEL, "train.sequence_length=64", *_PAIRS),
    ],
    "scripts.tutorial_zero1": [
        *("--degrees", "2", "--out", "measured"),
        *("model.vocab_size=509", "model.num_hidden_layers=1", "model.hidden_size=50", "model.intermediate_size=200"),
    ],
}


def shardwise(arguments: list[str]) -> int:
    if arguments[0] == "train" and "--dry-run" not in arguments:
        recipe = next(argument for argument in arguments[1:] if argument in RECIPES)
        # The last step of a run that has two is its second.
        arguments = [re.sub(r"step-\d{8}", "step-00000002", argument) for argument in arguments] + RECIPES[recipe]
        if {"train.stop_after=10", "optimizer.name=lamb"} & set(arguments) and "checkpoint.load" not in str(arguments):
            arguments.append("parallel.tensor=1")
        if recipe == "gpt2-xl" and "RANK" not in os.environ:
            arguments += ["--nproc", "2"]
    return run(["-m", "shardwise", *arguments])


def torchrun(arguments: list[str]) -> int:
    # Two nodes of two ranks once; where TP is 1, or has been seen across replicas, of one.
    ranks = 2 if "llama2-7b" in arguments else 1
    text = "\n".join(arguments).replace("--nproc_per_node=32", f"--nproc_per_node={ranks}")
    nodes, port = 1, free_port()
    if "--nnodes=4" in text:
        nodes, text = 2, re.sub(r":29500\b", f":{port}", text.replace("--nnodes=4", "--nnodes=2"))
    else:
        text = f"--master-port={port}\n{text}"
    command = [sys.executable, "-m", "torch.distributed.run", *text.split("\n")]
    return max([agent.wait() for agent in [subprocess.Popen(command) for _ in range(nodes)]])


def python(arguments: list[str]) -> int:
    if arguments[0] == "-m":
        arguments = [*arguments, *SCRIPTS[arguments[1]]]
        os.environ["PYTHONPATH"] = str(ROOT)
    return run(arguments)


def tensorboard(arguments: list[str]) -> int:
    return run(["-W", "ignore", "-m", "tensorboard.main", "--inspect", *arguments])


def make(arguments: list[str]) -> int:
    return subprocess.call(["/usr/bin/env", f"PATH={os.environ['USUAL_PATH']}", "make", "-C", ROOT, "-n", *arguments])


def run(arguments: list[str]) -> int:
    return subprocess.call([sys.executable, *arguments])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


COMMANDS = {"shardwise": shardwise, "torchrun": torchrun, "python": python, "tensorboard": tensorboard, "make": make}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
