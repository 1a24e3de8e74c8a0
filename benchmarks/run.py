"""`make bench`: measure shardwise beside its alternatives and piece by piece, on the machine that this runs on.

Prints tables and writes each section's figures and table to benchmarks/results. Every measurement runs in fresh
processes of one thread. Close what else is running: the table says how busy the machine was at the start.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import time
from pathlib import Path

import report

from shardwise.base.hardware import accelerators

SECTIONS = {
    "side_by_side": "the same Llama by shardwise, torch DDP, FSDP2 and transformers' tensor parallelism",
    "fused": "Q, K, V and gate, up in one matmul against separate ones",
    "experts": "experts of a block against transformers",
    "block_step": "a block by torch's dispatcher: operators, bytes moved and held, beside another tree (BENCH_BESIDE)",
    "head_loss": "LM head and loss in chunks against whole logits",
    "collectives": "collectives on gloo",
    "matmul": "float32 matmuls by MKL and oneDNN",
    "dropout": "dropout in both modes, and recompute: time and memory",
    "documents": "documents kept apart within a sample, by document and by a dense mask: time and memory (slow: only "
    "when named)",
    "packing": "documents packed by best fit: padding, time, and training beside that of cut samples (slow: only when "
    "named)",
    "checkpoint": "saving and loading against plain writes and copies",
    "memory_copies": "copies of the state in memory: their cost, and how soon a killed training goes on (slow: only "
    "when named)",
    "data_prepare": "data prepare of 100 MB beside the bare batch encoder (slow: only when named)",
    "data_reading": "opening, indexing and reading data, and what llama-small waits for them",
    "importing": "a checkpoint of torch's distributed format, read as checkpoint import does, beside safetensors",
    "start_up": "what commands take before they do what they are for",
    "metrics": "measuring and recording every step against none (slow: only when named)",
    "watching": "what ls, monitor and a first reading take, of a run of 1,024 ranks and 100,000 steps",
    "startup": "what a start, a save and a resume cost as ranks grow to 4,096, without the ranks (slow: "
    "only when named)",
    "planning": "what shardwise plan takes for a layout and for all, beside its targets",
    "bitwise": "bit-equal training beside sums in any order: time and bytes sent",
    "calibration": "shardwise plan after --calibrate against steps and memory on this machine (slow: only when named)",
    "memory": "optimizer state and peak memory against their formulas",
    "rounding": "bfloat16 by stochastic rounding beside rounding to nearest and mixed precision: loss and time",
    "muon": "a step of Muon beside one of AdamW, on llama-small",
    "sharding": "the stages of ZeRO and torch FSDP2 around one model: step time and memory",
    "context_parallel": "ranks that share samples: memory of a long sequence, step time beside data parallelism",
    "muon_layouts": "Muon at 35 layouts of eight ranks against one process (slow: only when named)",
    "overlap": "reductions and gathers behind computation, beside torch DDP, on an accelerator in software (slow: only "
    "when named)",
    "tensor_overlap": "tensor-parallel collectives behind matmuls, on CPU ranks and an accelerator in software (slow: "
    "only when named)",
    "compiling": "time to the first step with and without shardwise compile, two workers against one (slow: only when "
    "named)",
    "waiting": "commands to their first step or their end, beside another tree (BENCH_BESIDE) and launchers (slow: "
    "only when named)",
    "device": "Llama 2 7B's blocks on accelerators: tokens/s, MFU, hidden communication (needs an accelerator)",
    "parity": "every layout of eight ranks against one process, for four families (slow: only when named)",
    "optimizers": "AdamW and Muon on llama-small, each at five learning rates (slow: only when named)",
    "moments": "AdamW's moments in bfloat16 beside float32, on llama-small (slow: only when named)",
    "bits": "bit-equal training at every layout of eight ranks against one process (slow: only when named)",
    "quickstart": "the quickstart beside another tree's: time and perplexity (slow: only when named)",
    "fp8": "a small Llama with products in fp8 beside mixed precision (slow: only when named)",
    "precision": "llama-small in float32, mixed and bfloat16, also rounded to nearest (slow: only when named)",
}
ONLY_WHEN_NAMED = (
    "overlap",
    "compiling",
    "waiting",
    "documents",
    "packing",
    "tensor_overlap",
    "parity",
    "bits",
    "muon_layouts",
    "optimizers",
    "moments",
    "quickstart",
    "fp8",
    "precision",
    "data_prepare",
    "memory_copies",
    "metrics",
    "startup",
    "calibration",
)


def main() -> None:
    listing = "\n".join(f"  {name:14} {text}" for name, text in SECTIONS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"sections:\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="what to measure (default: all but the slow)")
    parser.add_argument("--rounds", type=int, default=3, help="more rounds, steadier medians (default: 3)")
    parser.add_argument("--steps", type=int, help="parity: steps of each training; precision: end after them")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of the results")
    parser.add_argument("--page", action="store_true", help="put the side-by-side table into docs/performance.md too")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if arguments.rounds < 1:
        parser.error(f"--rounds ({arguments.rounds}) must be at least 1")
    has_accelerator = accelerators()[1] > 0
    if "device" in arguments.sections and not has_accelerator:
        parser.error("device: this machine must have an accelerator that torch can use, and there is none")
    left_out = ONLY_WHEN_NAMED if has_accelerator else (*ONLY_WHEN_NAMED, "device")
    for name in arguments.sections or [name for name in SECTIONS if name not in left_out]:
        print(f"{name}: {SECTIONS[name]}", flush=True)
        surroundings = report.environment()
        start = time.monotonic()
        section = importlib.import_module(name)
        options = {"steps": arguments.steps} if "steps" in inspect.signature(section.run).parameters else {}
        found: report.Report = section.run(arguments.rounds, **options)
        surroundings["seconds"] = round(time.monotonic() - start)
        found.save(arguments.results, surroundings)
        print(f"\n{found.markdown(surroundings)}", flush=True)
        if arguments.page and name == "side_by_side":
            report.write_page(found, surroundings)


if __name__ == "__main__":
    main()
