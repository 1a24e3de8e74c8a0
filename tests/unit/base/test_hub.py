"""Hub ids are fetched once, through the hub's own protocol; what goes wrong is told in one sentence."""

import errno
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.base import hub
from shardwise.base.errors import ConfigError
from shardwise.checkpoint.format.weight_files import resolve_weights
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer
from tests.hub_user import HubUser
from tests.loopback_hub import Site, serve
from tests.screens import Log, Screen

FILES = {
    "main": {
        "config.json": b"{}",
        "model.safetensors": b"newest",
        "tokenizer.json": b"[]",
        "pytorch_model.bin": b"a pickle",
        "onnx/model.safetensors": b"for another program",
        "README.md": b"text",
    },
    "v1": {"config.json": b"{}", "model.safetensors": b"first"},
    "pickled": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
    "words": {"vocab.txt": b"[SEP]", "README.md": b"text", "license.txt": b"terms"},
    "licensed": {
        "config.json": b"{}",
        "model.safetensors": b"newest",
        "README.md": b"text",
        **dict.fromkeys(("LICENSE", "LICENCE.md", "License.txt", "NOTICE", "USE_POLICY.md"), b"terms"),
    },
    "half": {"vocab.json": b"{}", "config.json": b"{}"},
}


@pytest.fixture
def site() -> Iterator[Site]:
    with serve(FILES) as started:
        yield started


CALL = """
import json, sys
from shardwise.base.errors import ConfigError
from shardwise.checkpoint.format.weight_files import resolve_weights
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer
function, arguments, cached = json.loads(sys.argv[1])
said = []
try:
    result = {"folder": str(globals()[function](*arguments, cached=cached, announce=said.append))}
except ConfigError as error:
    result = {"problems": error.problems}
print(json.dumps(result | {"said": said, "torch": "torch" in sys.modules}))
"""
COLD = (sys.executable, "-B")
"""A Python of its own, and not one that has imported torch already."""


class User(HubUser):
    """Fetches weights and tokenizers; `said` is what the last one announced."""

    said: list[str]

    def resolve(self, load: str, revision: str | None = None, *, cached: bool = False, **options: Any) -> Path:
        return self._folder("resolve_weights", [load, revision], cached, **options)

    def tokenizer(self, named: str, *, cached: bool = False, **options: Any) -> Path:
        return self._folder("resolve_tokenizer", [named], cached, **options)

    def refused(self, load: str, revision: str | None = None, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            self.resolve(load, revision, **options)
        return str(caught.value)

    def _folder(self, function: str, arguments: list[str | None], cached: bool, **options: Any) -> Path:
        """Raises ConfigError as the call did."""
        result = self.call(CALL, [function, arguments, cached], **options)
        self.said = result["said"]
        assert options.get("python") != COLD or not result["torch"], "the launcher has no torch, and no time for it"
        if "problems" in result:
            raise ConfigError(result["problems"])
        return Path(result["folder"])


@pytest.fixture
def user(tmp_path: Path, site: Site) -> User:
    return User(tmp_path, site)


def test_only_what_is_needed_is_fetched_and_once(user: User, site: Site) -> None:
    folder = user.resolve("acme/tiny", python=COLD)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (folder / "model.safetensors").read_bytes() == b"newest"
    (line,) = user.said
    assert f"fetching acme/tiny from {site.address}: once" in line
    assert sorted(site.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert user.resolve("acme/tiny") == folder
    assert user.said == []
    assert len(site.fetched) == 3


@pytest.mark.slow
def test_ranks_ask_nobody(user: User, site: Site) -> None:
    folder = user.resolve("acme/tiny", "v1")
    assert (folder / "model.safetensors").read_bytes() == b"first"
    asked = len(site.requests)
    assert user.resolve("acme/tiny", "v1", cached=True) == folder
    assert user.resolve("acme/tiny", site.commit("v1")) == folder
    assert site.requests[asked:] == [], "a rank, or a commit that is here, needs no network"
    said = user.refused("acme/tiny", "main", cached=True)
    assert re.search("acme/tiny at revision main.*must be in the cache of this machine", said)


def test_without_a_network_the_cache_serves(user: User) -> None:
    folder = user.resolve("acme/tiny")
    assert user.resolve("acme/tiny", HF_HUB_OFFLINE="1") == folder
    assert user.resolve("acme/tiny", HF_ENDPOINT="http://127.0.0.1:9") == folder
    said = user.refused("acme/other", HF_HUB_OFFLINE="1")
    assert re.search("HF_HUB_OFFLINE is set, and the cache .* lacks it; fetch it where there is access", said)
    said = user.refused("acme/other", HF_ENDPOINT="http://me:password@127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached, and the cache" in said
    assert "password" not in said


def test_what_is_refused(user: User, site: Site) -> None:
    """Gated and missing repositories and a hub that fails are told in formats/test_datasets_of_the_hub.py."""
    said = user.refused("acme/tiny", "v9")
    assert "checkpoint.revision (v9) must be a branch, tag or commit of acme/tiny" in said
    said = user.refused("acme/private", HF_TOKEN="hf_expired")
    assert "checkpoint.load (acme/private)" in said
    assert "answers with status 401; set HF_TOKEN to a valid token" in said
    said = user.refused("acme/tiny", "pickled")
    assert "pickled (pytorch_model.bin): opening a pickle can run any code" in said
    assert "pytorch_model.bin" not in site.fetched


@pytest.mark.slow
def test_of_a_tokenizer_nothing_else_is_fetched(user: User, site: Site) -> None:
    folder = user.tokenizer("acme/tiny")
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json"}
    assert site.fetched == ["tokenizer.json"]
    assert f"fetching acme/tiny from {site.address}: once" in user.said[0]
    asked = len(site.requests)
    assert user.tokenizer("acme/tiny", cached=True) == folder
    assert site.requests[asked:] == [], "a rank needs no network"
    assert user.resolve("acme/tiny") == folder
    assert sorted(site.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]
    # The hub's client looks whether a file is there, and at nothing else; also of a commit, which never changes.
    site.requests.clear()
    for named in ("acme/tiny", f"acme/tiny@{site.commit('main')}"):
        file = user.tokenizer(named) / "tokenizer.json"
        file.resolve().write_bytes(b"[")
        assert (user.tokenizer(named) / "tokenizer.json").read_bytes() == b"[]", named
    assert site.fetched == ["tokenizer.json"] * 2, "a damaged one is fetched again"


def test_fault_05_licences_come_with_weights_and_tokenizers(user: User) -> None:
    licences = {"LICENSE", "LICENCE.md", "License.txt", "NOTICE", "USE_POLICY.md"}
    weights = user.resolve("acme/tiny", "licensed")
    assert {path.name for path in weights.iterdir()} == {"config.json", "model.safetensors", *licences}
    tokenizer = user.tokenizer("acme/tiny@words")
    assert {path.name for path in tokenizer.iterdir()} == {"vocab.txt", "license.txt"}


@pytest.mark.slow
def test_a_tokenizer_at_a_revision(user: User, site: Site) -> None:
    assert (user.tokenizer("acme/tiny@words") / "vocab.txt").read_bytes() == b"[SEP]"
    assert user.tokenizer(f"acme/tiny@{site.commit('words')}").name == site.commit("words")
    for named, cached, told in (
        ("acme/tiny@v1", False, r"\(acme/tiny@v1\) must hold a tokenizer, which is .*: it has config.json"),
        ("acme/tiny@half", False, "must hold a tokenizer, which is .*: it has config.json and vocab.json"),
        ("acme/tiny@v9", False, r"the revision of data.tokenizer \(v9\) must be a branch, tag or commit of"),
        ("acme/tiny@", False, r"data.tokenizer \(acme/tiny@\) must have a branch, tag or commit after @"),
        ("acme/tiny@v9", True, r"data.tokenizer \(acme/tiny at revision v9\) must be in the cache of this"),
    ):
        with pytest.raises(ConfigError, match=told):
            user.tokenizer(named, cached=cached)


LOOK = """
import json, sys
from shardwise.base import hub
from shardwise.base.errors import ConfigError
from shardwise.data.tokens.tokenizer_files import place_of_tokenizer
found = []
for named in json.loads(sys.argv[1]):
    try:
        found.append(hub.find_on_hub(place_of_tokenizer(named)))
    except ConfigError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def test_a_look_fetches_nothing(user: User, site: Site) -> None:
    """What a dry run does with a hub id."""
    found = user.call(LOOK, ["acme/tiny", "acme/tiny@none", "acme/tiny@half", "acme/private", "acme/broken"])
    texts = ["hub", "must be a branch, tag", "must hold a tokenizer", "no such repository", "unknown"]
    assert [text for text, said in zip(texts, found, strict=True) if text not in said] == [], found
    assert site.fetched == []
    assert not list((user.at / "hf").rglob("tokenizer.json"))
    user.tokenizer("acme/tiny")
    site.requests.clear()
    assert user.call(LOOK, ["acme/tiny", "acme/other"], HF_HUB_OFFLINE="1") == ["cache", "unknown"]
    assert site.requests == []


def test_a_disk_without_room_for_what_is_fetched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    download = hub.HubFiles.download

    def full(wanted: hub.HubFiles, *, local_files_only: bool = False) -> Path:
        if local_files_only:
            return download(wanted, local_files_only=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub.HubFiles, "download", full)
    told = r"\(acme/tiny\) cannot be fetched from http.* into .*: No space left on device"
    with pytest.raises(ConfigError, match=told):
        resolve_weights("acme/tiny", cached=False)


def test_files_are_known_by_their_hashes(tmp_path: Path) -> None:
    names = {
        "large": hashlib.sha256(b"large").hexdigest(),
        "small": hashlib.sha1(b"blob 5\0small").hexdigest(),
        "cut off": hashlib.sha256(b"cut off, once").hexdigest(),
        "of another kind": "etag-7",
    }
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot/deeper").mkdir(parents=True)
    for content, name in names.items():
        (tmp_path / "blobs" / name).write_bytes(content.encode())
        (tmp_path / "snapshot/deeper" / content).symlink_to(tmp_path / "blobs" / name)
    assert hub.drop_damaged_files(tmp_path / "snapshot") == [tmp_path / "snapshot/deeper/cut off"]
    assert {path.name for path in (tmp_path / "blobs").iterdir()} == set(names.values()) - {names["cut off"]}
    assert hub.drop_damaged_files(tmp_path / "snapshot") == []


def test_a_long_fetch_has_lines_in_a_log(shown: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bytes that came; on a terminal the client shows its own bars, and on other ranks there is nothing."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    blobs = tmp_path / "models--acme--tiny/blobs"
    blobs.mkdir(parents=True)
    (blobs / "of-another-revision").write_bytes(bytes(1 << 20))
    (tmp_path / "tokenizer.json").touch()
    arrived = iter(range(9))

    def download(_: object, *, local_files_only: bool = False) -> Path:
        if local_files_only:
            raise LocalEntryNotFoundError("none")
        (blobs / f"{next(arrived)}.incomplete").write_bytes(bytes(2 << 20))
        return tmp_path

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "drop_damaged_files", lambda *_: [])
    monkeypatch.setattr(hub, "sys", SimpleNamespace(stderr=shown.stream))
    monkeypatch.setattr(hub.HubFiles, "download", download)
    for announce in (print, None):
        resolve_tokenizer("acme/tiny", announce=announce)
    text = shown.text()
    assert text.startswith("" if isinstance(shown, Screen) else "fetching acme/tiny: 2.0 MiB, ")
    assert text.count("\n") == (not isinstance(shown, Screen))
