"""What `shardwise plan` takes for a layout, and for all layouts of a recipe. Nothing is predicted here but its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from measure import median
from report import Report, Table, target

NODES, BATCH = 128, 1536
LAYOUTS = (  # of 96 or 128 blocks on 1,024 devices with TP 8: (pipeline, schedule, virtual stages, blocks)
    (64, "1f1b", None, 96),
    (64, "gpipe", None, 96),
    (64, "interleaved", 2, 128),
    (64, "interleaved_zero_bubble", 2, 128),
    (64, "zbv", None, 128),
    (64, "dualpipev", None, 128),
    (32, "interleaved", 3, 96),
    (8, "interleaved", 12, 96),
)
ONE = """
import json, sys, time
from shardwise.config import load_config
from shardwise_plan.makespan import makespan
from shardwise_plan.device_specs import cluster
from shardwise_plan.search import search

keys, nodes = json.loads(sys.argv[1]), int(sys.argv[2])
config, on = load_config("gpt3-175b", [f"{key}={value}" for key, value in keys.items()]), cluster("h100:8", nodes)
fixed = {*keys, "parallel.sequence", "train.recompute", "optimizer.zero"}
seconds = []
for _ in range(8):
    makespan.cache_clear()
    start = time.perf_counter()
    found = search(config, on, fixed=fixed)
    seconds.append(time.perf_counter() - start)
assert found.valid == 1, found
assert "torch" not in sys.modules
print(json.dumps(seconds))
"""
ALL = """
import json, resource, sys, time
from shardwise.config import load_config
from shardwise_plan.device_specs import cluster
from shardwise_plan.search import search

found = search(load_config("gpt3-175b"), cluster("h100:8", int(sys.argv[1])))
assert found.plans
assert "torch" not in sys.modules
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": time.process_time(), "peak": peak, "layouts": found.valid}))
"""


def run(rounds: int) -> Report:
    rows, firsts, laters = [], [], []
    for pipeline, schedule, virtual, blocks in LAYOUTS:
        keys = {
            "parallel.tensor": 8, "parallel.pipeline": pipeline, "parallel.schedule": schedule, "train.micro_batch": 1,
            "train.global_batch": BATCH, "model.num_hidden_layers": blocks,
        }  # fmt: skip
        keys |= {} if virtual is None else {"parallel.virtual_stages": virtual}
        found = [_in_a_process(ONE, json.dumps(keys), str(NODES)) for _ in range(rounds)]
        first, later = median([one[0] for one in found]), median([median(one[3:]) for one in found])
        firsts.append(first)
        laters.append(later)
        stages = f", {virtual} stages a rank" if virtual else ""
        micro_batches = BATCH * pipeline * 8 // (NODES * 8)
        rows.append(
            (f"PP {pipeline}, {schedule}{stages}", str(micro_batches), f"{first * 1e3:.1f}", f"{later * 1e3:.1f}")
        )
    whole = [_in_a_process(ALL, str(NODES)) for _ in range(rounds)]
    seconds, peak = median([one["seconds"] for one in whole]), max(one["peak"] for one in whole)
    return Report(
        "planning",
        "What the planner takes",
        [Table(("one layout of GPT-3 175B, ms", "micro-batches", "first", "later"), rows)],
        {"layouts": rows, "all": whole},
        targets=[
            target("ms of one layout, the first of a process", max(firsts) * 1e3, 20, at_least=False),
            target("ms of one layout, later", max(laters) * 1e3, 20, at_least=False),
            target(f"processor seconds of all {whole[0]['layouts']:,} layouts", seconds, 10, at_least=False),
            target("MiB of all layouts", peak / 2**20, 300, at_least=False),
        ],
        notes=[
            f"On {NODES * 8:,} H100. A layout has valid degrees, memory and step time; first: with the order of its "
            f"actions and all else that is kept for later layouts; medians of {rounds} processes. Later: of 5 in each, "
            "in which the step is simulated again. PP 64 with two stages a rank needs 128 blocks; the model has 96.",
            "All layouts: of a whole process, imports too. Nothing imports torch.",
        ],
    )


def _in_a_process(code: str, *arguments: str) -> Any:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
