"""Hugging Face data sets from the command line: saved text and tokens, and a name on the hub."""

from pathlib import Path

import pytest

from tests.e2e.command import metrics, miniature, shardwise, within
from tests.e2e.page import run_section
from tests.e2e.test_evaluate_and_generate import answer
from tests.loopback_hub import TOKEN, serve, user_of
from tests.unit.data.formats.test_datasets_of_the_hub import FILES


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    """docs/data.md: text and tokens are trained on; each part of the data is evaluated."""
    _, (text, tokens) = run_section("Hugging Face datasets", tmp_path)
    assert " 400 documents, " in text.out
    assert " 400 rows, " in tokens.out
    assert not (tmp_path / "runs/blocks/checkpoints/step-00000004/tokenizer.json").exists()
    for run in ("stories", "blocks"):
        found = answer(within("evaluate", f"runs/{run}", "--json", at=tmp_path))
        assert (found["part"], found["data"]) == ("eval", run)
        assert 0 < found["loss"] < 8
    said = within("evaluate", "runs/blocks", "data.path=stories", at=tmp_path).failed(2)
    assert "data.path (stories) holds text, which is read with the model's tokenizer: name it by data.tokenizer" in said


@pytest.mark.slow
def test_a_data_set_of_the_hub(tmp_path: Path) -> None:
    """The launcher fetches it, the ranks find it in the cache; the token is nowhere in the run."""
    miniature(tmp_path)
    options = ["miniature.yaml", "data.dataset=acme/gated", "data.config=en", "data.split=train,validation"]
    with serve(FILES) as site:
        variables = user_of(site.address, str(tmp_path / "hf")) | {"SHARDWISE_CACHE": str(tmp_path / "cache")}
        said = shardwise("train", *options, at=tmp_path, **variables, HF_TOKEN="")
        assert f"is gated: accept its licence on {site.address}/datasets/acme/gated, then set HF_TOKEN" in said.failed(
            2
        )
        done = shardwise("train", *options, "parallel.tensor=2", at=tmp_path, **variables, HF_TOKEN=TOKEN)
        assert done.code == 0, done.err
        fetched = [name for name in site.fetched if name.endswith(".parquet")]
    assert sorted(fetched) == ["en/train-0.parquet", "en/train-1.parquet", "en/validation.parquet"]
    run = (tmp_path / "runs/latest").resolve()
    assert len(metrics(run, "step")) == 4
    assert TOKEN not in done.out + done.err
    assert not [path for path in run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
