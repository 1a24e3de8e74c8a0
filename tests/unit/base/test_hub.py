"""Hub ids are fetched once, through the hub's own protocol; what goes wrong is told in one sentence."""

import errno
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.base import hub
from shardwise.base.errors import ConfigError
from shardwise.checkpoint.format.weight_files import resolve_weights
from tests.e2e.command import Outcome, shardwise
from tests.hub_user import HubUser
from tests.loopback_hub import TOKEN, Site, serve, user_of
from tests.stored import write_checkpoint

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
found = []
for function, arguments, cached in json.loads(sys.argv[1]):
    said = []
    try:
        folder = globals()[function](*arguments, cached=cached, announce=said.append)
        found.append([str(folder), said])
    except ConfigError as error:
        found.append([str(error), said])
assert "torch" not in sys.modules, "the launcher has no torch, and no time for it"
print(json.dumps(found))
"""
COLD = (sys.executable, "-B")
"""A Python of its own, and not one that has imported torch already."""


def weights(load: str, revision: str | None = None, cached: bool = False) -> Any:
    return ["resolve_weights", [load, revision], cached]


def tokenizer(named: str, cached: bool = False) -> Any:
    return ["resolve_tokenizer", [named], cached]


class User(HubUser):
    def found(self, *calls: Any, **variables: str) -> list[tuple[str, list[str]]]:
        """The folder or the error of each call in one process, and what it announced."""
        return [(text, said) for text, said in self.call(CALL, calls, python=COLD, **variables)]

    def texts(self, *calls: Any, **variables: str) -> list[str]:
        return [text for text, _ in self.found(*calls, **variables)]


@pytest.fixture
def user(tmp_path: Path, site: Site) -> User:
    return User(tmp_path, site)


def test_what_is_needed_is_fetched_once_and_the_cache_serves_ranks_and_users_offline(user: User, site: Site) -> None:
    calls = (weights("acme/tiny"), weights("acme/tiny"), weights("acme/tiny", "v1"))
    (place, (line,)), again, (first, _) = user.found(*calls)
    folder = Path(place)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (folder / "model.safetensors").read_bytes() == b"newest"
    assert (Path(first) / "model.safetensors").read_bytes() == b"first"
    assert f"fetching acme/tiny from {site.address}: once" in line
    assert again == (place, [])
    assert sorted(site.fetched) == ["config.json", *["model.safetensors"] * 2, "tokenizer.json"]
    asked = len(site.requests)
    ranks = (weights("acme/tiny", "v1", cached=True), weights("acme/tiny", site.commit("v1")))
    *found, missing = user.texts(*ranks, weights("acme/tiny", "half", cached=True))
    assert found == [first] * 2
    assert site.requests[asked:] == [], "a rank, or a commit that is here, needs no network"
    assert re.search("acme/tiny at revision half.*must be in the cache of this machine", missing)
    both = (weights("acme/tiny"), weights("acme/other"))
    found, said = user.texts(*both, HF_HUB_OFFLINE="1")
    assert found == place
    assert re.search("HF_HUB_OFFLINE is set, and the cache .* lacks it; fetch it where there is access", said)
    found, said = user.texts(*both, HF_ENDPOINT="http://me:password@127.0.0.1:9")
    assert found == place
    assert "http://127.0.0.1:9 cannot be reached, and the cache" in said
    assert "password" not in said


def test_fault_05_licences_come_with_weights_and_tokenizers_at_a_revision(user: User, site: Site) -> None:
    licences = {"LICENSE", "LICENCE.md", "License.txt", "NOTICE", "USE_POLICY.md"}
    found = user.texts(weights("acme/tiny", "licensed"), tokenizer("acme/tiny@words"))
    names = [{path.name for path in Path(folder).iterdir()} for folder in found]
    assert names == [{"config.json", "model.safetensors", *licences}, {"vocab.txt", "license.txt"}]
    cases = (
        (tokenizer(f"acme/tiny@{site.commit('words')}"), site.commit("words")),
        (tokenizer("acme/tiny@half"), "must hold a tokenizer, which is .*: it has config.json and vocab.json"),
        (tokenizer("acme/tiny@v9"), r"the revision of data.tokenizer \(v9\) must be a branch, tag or commit of"),
        (
            tokenizer("acme/tiny@v9", cached=True),
            r"data.tokenizer \(acme/tiny at revision v9\) must be in the cache of",
        ),
    )
    found = user.texts(*(call for call, _ in cases))
    assert [told for (_, told), text in zip(cases, found, strict=True) if re.search(told, text) is None] == []


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


def test_a_look_fetches_nothing_and_what_is_refused(user: User, site: Site) -> None:
    """What a dry run does with a hub id."""
    found = user.call(LOOK, ["acme/tiny", "acme/tiny@none", "acme/tiny@half", "acme/private"])
    texts = ["hub", "must be a branch, tag", "must hold a tokenizer", "no such repository"]
    assert [text for text, said in zip(texts, found, strict=True) if text not in said] == [], found
    assert site.fetched == []
    assert not list((user.at / "hf").rglob("tokenizer.json"))
    user.found(tokenizer("acme/tiny"))
    site.requests.clear()
    assert user.call(LOOK, ["acme/tiny", "acme/other"], HF_HUB_OFFLINE="1") == ["cache", "unknown"]
    assert site.requests == []
    # Gated and missing repositories and a hub that fails are told in formats/test_datasets_of_the_hub.py.
    unknown, pickled = user.texts(weights("acme/tiny", "v9"), weights("acme/tiny", "pickled"))
    assert "checkpoint.revision (v9) must be a branch, tag or commit of acme/tiny" in unknown
    assert "pickled (pytorch_model.bin): opening a pickle can run any code" in pickled
    (said,) = user.texts(weights("acme/private"), HF_TOKEN="hf_expired")
    assert "checkpoint.load (acme/private)" in said
    assert "answers with status 401; set HF_TOKEN to a valid token" in said
    assert "pytorch_model.bin" not in site.fetched


def test_a_full_disk_is_told_and_files_are_known_by_their_hashes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    download = hub.HubFiles.download

    def full(wanted: hub.HubFiles, *, local_files_only: bool = False) -> Path:
        if local_files_only:
            return download(wanted, local_files_only=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub.HubFiles, "download", full)
    told = r"\(acme/tiny\) cannot be fetched from http.* into .*: No space left on device"
    with pytest.raises(ConfigError, match=told):
        resolve_weights("acme/tiny", cached=False)
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


@pytest.fixture
def empty_hub() -> Iterator[Site]:
    with serve({}) as started:
        yield started


def push(at: Path, site: str, repository: str, **variables: str) -> Outcome:
    """The command in a process of its own: the hub's client reads its environment once."""
    if not (at / "checkpoints").exists():
        write_checkpoint(at / "checkpoints", shards=2)
    environment = {**os.environ, **user_of(site, str(at / "hf")), **variables}
    if "HF_TOKEN" not in variables:
        environment.pop("HF_TOKEN", None)
    return shardwise("checkpoint", "export", "checkpoints", "out", "--push", repository, at=at, **environment)


def test_an_export_is_uploaded_whole_and_private(tmp_path: Path, empty_hub: Site) -> None:
    done = push(tmp_path, empty_hub.address, "acme/mine", HF_TOKEN=TOKEN).succeeded()
    assert done.out.endswith(f"\nuploaded to {empty_hub.address}/acme/mine\n")
    assert TOKEN not in done.out + done.err
    exported = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "config.json", "model.safetensors"} <= exported.keys()
    assert empty_hub.uploaded == {"acme/mine": exported}


def test_many_files_are_one_commit(tmp_path: Path, empty_hub: Site) -> None:
    (tmp_path / "out").mkdir()
    files = {f"part-{number}.txt": b"%d" % number for number in range(260)}
    for name, content in files.items():
        (tmp_path / "out" / name).write_bytes(content)
    program = "import pathlib, shardwise.base.hub_upload as h; h.upload(pathlib.Path('out'), 'acme/mine', 'a model')"
    variables = {**os.environ, **user_of(empty_hub.address, str(tmp_path / "hf")), "HF_TOKEN": TOKEN}
    variables["HF_HUB_DISABLE_XET"] = "0"  # as installed; small files need no server of it
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=variables, check=True)
    assert empty_hub.uploaded == {"acme/mine": files}
    assert sum(request.endswith("/commit/main") for request in empty_hub.requests) == 1


def test_without_a_token_that_may_write_it_is_refused(tmp_path: Path, empty_hub: Site) -> None:
    for repository, text in (
        ("acme/mine", f"--push (acme/mine) needs a token that may write: set HF_TOKEN, or run `hf auth login` "
         f"({empty_hub.address}/settings/tokens)"),
        ("mine", "--push (mine) must be a repository of the hub, owner/name, of letters"),
    ):  # fmt: skip
        assert text in push(tmp_path, empty_hub.address, repository).failed(2)
    assert not (tmp_path / "out").exists()
    assert empty_hub.requests == []
    said = push(tmp_path, empty_hub.address, "acme/mine", HF_TOKEN="hf_of_somebody_else").failed(1)
    assert (
        f"out could not be uploaded as acme/mine: {empty_hub.address} refuses the token in use (status 401): set"
        in said
    )
    assert (tmp_path / "out/model.safetensors").exists(), "what was written stays"
