"""What a user may choose: their own text, one process, a tied model, precision."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import json_lines, metrics, miniature, shardwise

TEXT = "".join(f"Line {n}: the {w} of {n * 7} keys — naïve, 键.\n" for n, w in enumerate(["ring", "song", "map"] * 400))


def own_text(folder: Path, kind: str) -> Path:
    if kind == "file":
        path = folder / "own.txt"
        path.write_text(TEXT)
    elif kind == "folder":
        path = folder / "own"
        (path / "deeper").mkdir(parents=True)
        (path / "a.txt").write_text(TEXT[: len(TEXT) // 2])
        (path / "deeper/b.md").write_text(TEXT[len(TEXT) // 2 :])
    else:
        path = folder / "own.jsonl"
        path.write_text("".join(json.dumps({"body": line}) + "\n" for line in TEXT.splitlines(keepends=True)))
    return path


@pytest.mark.parametrize(
    ("kind", "documents"),
    [
        pytest.param("file", 1),
        pytest.param("folder", 2, marks=pytest.mark.slow),
        pytest.param("json lines", 1200, marks=pytest.mark.slow),
    ],
)
def test_own_text(kind: str, documents: int, tmp_path: Path) -> None:
    """One process, started as a user's first try would be, and with much turned off."""
    path = own_text(tmp_path, kind)
    done = shardwise(
        *("train", miniature(tmp_path), f"data.path={path.name}", "data.text_key=body", "train.steps=3", "log.every=2"),
        *("log.tensorboard=false", "log.sample_tokens=0", "model.tie_word_embeddings=true", "precision.mode=mixed"),
        at=tmp_path,
    ).succeeded()
    (data,) = [line for line in done.out.splitlines() if line.startswith("data: ")]
    assert data.startswith(f"data: {path.name}: ")
    assert f" {documents:,} document" in data
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
