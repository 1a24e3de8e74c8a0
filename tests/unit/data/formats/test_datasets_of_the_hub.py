"""Data sets of the hub: fetched and tokenized once, whoever starts."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from shardwise.data.tokens.tokenizer import train_tokenizer
from tests.hub_user import HubUser
from tests.loopback_hub import TOKEN, Site, serve
from tests.unit.data.small_runs import stories

TEXTS = stories()[:100]
TABLES = yaml.safe_load(Path(__file__).with_name("hub.yaml").read_text(encoding="utf-8"))
CARD = TABLES["card"]
REFUSED = TABLES["refused"]


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), file)
    return file.getvalue()


FILES = {
    "main": {
        "README.md": CARD.encode(),
        "en/train-0.parquet": parquet(TEXTS[:50]),
        "en/train-1.parquet": parquet([*TEXTS[50:80], ""]),
        "en/validation.parquet": parquet(TEXTS[80:]),
        "de/all.parquet": parquet(TEXTS[:10]),
    }
}

CALL = """
import json, multiprocessing, os, sys
from pathlib import Path
import datasets
from shardwise.base.errors import ConfigError
from shardwise.data.open_data import prepare_data
from shardwise.data.reading.dataset_tables import fetch_dataset
from tests.unit.data.small_runs import sized

root, jobs = json.loads(sys.argv[1])

def one(results, keys):
    os.environ.update({name: keys.pop(name) for name in list(keys) if name.isupper()})
    said = []
    try:
        config = sized(512, 64, 0, **keys)
        fetch_dataset(config.data, said.append)
        data = prepare_data(config, Path(root), announce=said.append)
        parts = {part: data.beginning(part, 10**9) for part in ("train", "eval", "test")}
        results.put({"parts": parts, "summary": data.summary, "said": said})
    except ConfigError as error:
        results.put({"problems": error.problems, "said": said})

context = multiprocessing.get_context("fork")
results, found = context.Queue(), []
for job in jobs:
    process = context.Process(target=one, args=(results, job))
    process.start()
    found.append(results.get())
    process.join()
    assert process.exitcode == 0
print(json.dumps(found))
"""


class User(HubUser):
    def prepare(self, *jobs: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
        """What came of each, one after another; in `jobs` are keys of `data`, and variables."""
        found: list[dict[str, Any]] = self.call(CALL, [str(self.at / "cache"), jobs], **options)
        return found


def problem(found: dict[str, Any]) -> str:
    (text,) = found["problems"]
    assert "\n" not in text
    return text


SCRIPT = {".gitattributes": b"", "README.md": b"", "tiny.py": b"raise SystemExit('a loading script was run')"}
CONVERTED = {
    "raw_en/train/0000.parquet": parquet(TEXTS[:50]),
    "raw_en/train/0001.parquet": parquet(TEXTS[50:80]),
    "raw_en/unsupervised/0000.parquet": parquet(TEXTS[80:]),
    "raw_ca/train/0000.parquet": parquet(TEXTS[:10]),
    "long/partial-train/0000.parquet": parquet(TEXTS[:10]),
}


@pytest.fixture
def site() -> Iterator[Site]:
    with serve(FILES) as started:
        yield started


@pytest.mark.slow
def test_of_a_loading_script_the_hubs_conversion_is_read(tmp_path: Path) -> None:
    jobs = [
        {"dataset": "acme/tiny", "config": "raw_en", "split": "train,unsupervised"},
        {"dataset": "acme/tiny@refs/convert/parquet", "config": "raw_en", "split": "train,unsupervised"},
        {"dataset": "acme/tiny"},
        {"dataset": "acme/tiny", "config": "de"},
        {"dataset": "acme/tiny", "config": "long"},
        {"dataset": "acme/tiny@main", "config": "raw_en"},
    ]
    with serve({"main": SCRIPT, "refs/convert/parquet": CONVERTED}) as site:
        user = User(tmp_path, site)
        own, named, *refused = user.prepare(*jobs)
        (offline,) = user.prepare(jobs[0], HF_HUB_OFFLINE="1")
    assert own["parts"] == named["parts"] == offline["parts"]
    assert own["summary"].startswith("acme/tiny raw_en: ")
    assert "100 documents" in own["summary"]
    line = (
        "acme/tiny is a loading script, which is not run: reading the hub's parquet files of it (refs/convert/parquet)"
    )
    assert own["said"].count(line) == offline["said"].count(line) == 1
    assert line not in named["said"]
    names = "must name a configuration of acme/tiny: raw_en, raw_ca or long"
    assert [problem(found) for found in refused] == [
        f"data.config {names}",
        f"data.config (de) {names}",
        "data.dataset (acme/tiny) is a loading script, of whose data the hub has converted only the beginning "
        "(partial-train): set data.path to a copy of its data (`shardwise explain loading-script`)",
        "data.dataset (acme/tiny@main) is a loading script, and the hub converts that of the main branch alone: leave "
        "out @main",
    ]


@pytest.fixture
def user(tmp_path: Path, site: Site) -> User:
    return User(tmp_path, site)


def test_what_the_hub_refuses_and_what_the_cache_serves_without_network(user: User, site: Site) -> None:
    page = f"{site.address}/datasets/acme"
    account = f"set HF_TOKEN to a token of that account ({site.address}/settings/tokens)"
    places = {"page": page, "account": account, "address": site.address}
    cases = {case: text.format(**places) for case, text in REFUSED.items()}
    jobs = [dict(zip(("dataset", "config", "split"), case.split(), strict=False)) for case in cases]
    own, job = {"dataset": "acme/gated", "config": "de", "HF_TOKEN": TOKEN}, {"dataset": "acme/tiny", "config": "de"}
    sources = {"far": {"dataset": "acme/tiny", "config": "de", "weight": 1}, "own": {"dataset": "tiny"}}
    mixed = {"dataset": None, "mixture": sources, "stages": [{"at": 1, "weights": {"own": 1}}]}
    *refused, near, allowed, mixture, first = user.prepare(*jobs, {"dataset": "pyton"}, own, mixed, job)
    assert [problem(each) for each in refused] == [*cases.values()]
    assert problem(near).endswith("; did you mean data.dataset=python?")
    assert ", 10 documents, " in allowed["summary"]
    assert "far: acme/tiny de: " in mixture["summary"], "sources of a mixture are fetched"
    asked = len(site.requests)
    again, other, unknown = user.prepare(job, job | {"config": "en"}, {"dataset": "acme/other"}, HF_HUB_OFFLINE="1")
    assert (again["parts"], again["said"], len(site.requests)) == (first["parts"], [], asked)
    assert problem(other).startswith("data.dataset (acme/tiny) cannot be loaded at commit ")
    assert "HF_HUB_OFFLINE is set, and the cache" in problem(unknown)


STREAMED = """
import json, sys
from pathlib import Path
from shardwise.data.formats.prepared_data import make_batches
from shardwise.data.open_data import prepare_data
from shardwise.data.reading.dataset_tables import fetch_dataset
from shardwise.data.samples.text_stream import StreamPosition
from shardwise.data.tokens.tokenizer import Tokenizer
from tests.unit.data.samples.test_text_stream import config

root, tokenizer, keys = json.loads(sys.argv[1])
chosen = config(None, Path(tokenizer), buffer=20, **keys)
fetch_dataset(chosen.data, None)
data = prepare_data(chosen, Path(root))
batches, place, texts = make_batches(chosen, data, "train"), StreamPosition(), []
for block in range(3):
    found = batches._stream.block(place)
    texts += Tokenizer.load(tokenizer).decode(found.samples.tokens).split("<|endoftext|>")[:-1]
    place = found.stop
again = make_batches(chosen, data, "train")._stream.block(found.start).samples.tokens.tolist()
assert again == found.samples.tokens.tolist(), "from where a block begins, the same is read"
print(json.dumps({"texts": texts, "held": data.count("eval"), "summary": data.summary}))
"""


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_streamed(user: User, site: Site, tmp_path: Path) -> None:
    """Nothing is downloaded but what is read; which files there are is kept."""
    train_tokenizer(TEXTS, 300, "text").save(tmp_path / "tokenizer")
    keys = {"dataset": "acme/tiny", "config": "en", "split": "train,validation"}
    for start in range(2):
        asked = len(site.requests)
        found = user.call(STREAMED, [str(tmp_path / "cache"), str(tmp_path / "tokenizer"), keys])
        assert found["summary"].startswith("acme/tiny: a stream of 2 files, ")
        assert found["held"] > 0
        assert len(found["texts"]) == 60
        assert set(found["texts"]) < set(TEXTS[:80])
        assert not list((user.at / "hf").rglob("*.parquet")), "a file lies in the cache, and may not fit there"
        resolved = any("dataset_infos.json" in request for request in site.requests[asked:])
        assert resolved == (start == 0), "which files there are is asked once"
