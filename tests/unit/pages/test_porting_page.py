"""docs/porting.md: our names in its tables exist, and its code runs."""

import re
from typing import Any

import torch

import shardwise as sw
from shardwise.config.other_names import ARGUMENTS
from shardwise.distributed import collectives
from tests.arch.source import ROOT

PAGE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
_, LIBRARIES = PAGE.split("## neuronx-distributed and Megatron-LM")
LIBRARIES, TORCH_XLA = LIBRARIES.split("## torch_xla's ZeRO-1")


def test_our_names_in_the_tables_exist_and_say_what_the_refusals_say() -> None:
    rows = [row.split("|")[3] for row in LIBRARIES.splitlines() if row.count("|") == 4]
    assert len(rows) > 20
    code = re.findall(r"`([^`]+)`", " ".join(rows[2:]))
    public = {name[0] for name in (re.match(r"[A-Z]\w+|[a-z]+_cross_entropy", text) for text in code) if name}
    assert len(public) > 10
    assert public <= set(sw.__all__)
    functions = [text.removeprefix("collectives.") for text in code if text.startswith("collectives.")]
    assert len(functions) == 7
    assert all(hasattr(collectives, name) for name in functions)
    rows = [row for row in TORCH_XLA.splitlines() if row.startswith("| by name | `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    assert len(names) == 6
    for name in names:
        (row,) = (row for row in rows if f"`{name}`" in row)
        wanted = re.findall(r"`([^`]+)`", row.split("|")[3])
        advice = ARGUMENTS["optimizer"][name]
        assert advice == f"use {wanted[0]}" if wanted else advice.startswith("leave it out"), row


def test_the_call_of_torch_xla_works() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", TORCH_XLA, re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {"model": torch.nn.Linear(2, 2).bfloat16(), "torch": torch}
    exec(compile(code, "porting.md", "exec"), scope)
    assert (scope["optimizer"].grad_clipping, scope["optimizer"].max_norm) == (True, 1.0)
    assert {bucket.master.dtype for bucket in scope["optimizer"].buckets} == {torch.float32}
