"""What a user may choose: their own text, one process, a tied model, precision."""

import json
from pathlib import Path

from tests.e2e.command import json_lines, metrics, miniature, shardwise

TEXT = "".join(f"Line {n}: the {w} of {n * 7} keys — naïve, 键.\n" for n, w in enumerate(["ring", "song", "map"] * 400))


def test_own_text(tmp_path: Path) -> None:
    """One process, started as a user's first try would be, and with much turned off."""
    path = tmp_path / "own.txt"
    path.write_text(TEXT)
    done = shardwise(
        *("train", miniature(tmp_path), f"data.path={path.name}", "train.steps=3", "log.every=2"),
        *("log.tensorboard=false", "log.sample_tokens=0", "model.tie_word_embeddings=true", "precision.mode=mixed"),
        at=tmp_path,
    ).succeeded()
    (data,) = [line for line in done.out.splitlines() if line.startswith("data: ")]
    assert data.startswith(f"data: {path.name}: ")
    assert " 1 document" in data
    assert "sample: " not in done.out
    run = tmp_path / "runs/latest"
    assert not (run / "tensorboard").exists(), "log.tensorboard=false writes it all the same"
    assert [one["step"] for one in metrics(run, "eval")] == [0, 2, 3]
    of_rank = [line for line in json_lines(run / "ranks/rank-0000.jsonl") if "step" in line]
    for lines in (metrics(run, "step"), of_rank):
        assert [line["step"] for line in lines] == [2, 3], "log.every thins the lines, but the last one is always there"
    results = json.loads((run / "results.json").read_text())
    assert results["layout"]["ranks"] == 1
    assert results["precision"] == {
        "parameter": "bfloat16", "gradient": "float32", "reduce": "float32", "optimizer": "float32",
        "moments": "float32", "rounding": "nearest",
    }  # fmt: skip
    assert results["sample"] is None
    config = json.loads((run / "checkpoints/step-00000003/config.json").read_text())
    assert (config["tie_word_embeddings"], config["torch_dtype"]) == (True, "bfloat16")
