"""The pods of docs/containers.md, as processes of this machine."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.arch.test_docs import manifests
from tests.e2e.command import miniature, outcome, start

PODS = 2


@pytest.mark.slow
def test_pods_with_the_variables_of_the_manifest_train_together(tmp_path: Path) -> None:
    job: Any = manifests()[1]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["PET_NNODES"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    # As one machine has them: fewer pods, a rank each, on loopback.
    variables |= {"PET_NNODES": str(PODS), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    torchrun, *words = container["command"]
    assert torchrun == "torchrun"
    words[words.index("llama2-7b")] = miniature(tmp_path)
    program = (sys.executable, "-m", "torch.distributed.run")
    pods = [
        start(*words, *container["args"], at=tmp_path, program=program, **(variables | {"PET_NODE_RANK": str(number)}))
        for number in range(PODS)
    ]
    for pod in pods:
        assert outcome(pod).code == 0
    results = json.loads((tmp_path / "runs/llama2-7b/results.json").read_text())
    assert results["layout"]["ranks"] == PODS
