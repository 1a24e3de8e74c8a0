"""Hub ids are fetched once, through the hub's own protocol; what goes wrong is told in one sentence."""

import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.base import hub
from shardwise.base.errors import ConfigError
from shardwise.base.hub import check_weights
from tests.e2e.command import shardwise
from tests.loopback_hub import TOKEN, Site, serve, user_of
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
from shardwise.base import hub
from shardwise.base.errors import ConfigError
function, arguments, cached = json.loads(sys.argv[1])
said = []
try:
    result = {"folder": str(getattr(hub, function)(*arguments, cached=cached, announce=said.append))}
except ConfigError as error:
    result = {"problems": error.problems}
print(json.dumps(result | {"said": said, "torch": "torch" in sys.modules}))
"""
COLD = (sys.executable, "-B")
"""A Python of its own, and not one that has imported torch already."""


class User:
    """Calls `hub` in a process of its own: the hub's client reads its environment once."""

    def __init__(self, at: Path, site: Site) -> None:
        self.at, self.said = at, [""]
        self.script = at / "call.py"
        self.script.write_text(CALL)
        self.environment = {**os.environ, **user_of(site.address, str(at / "hf"))}
        self.environment.pop("HF_TOKEN", None)

    def resolve(
        self,
        load: str,
        revision: str | None = None,
        *,
        cached: bool = False,
        python: tuple[str, ...] = (sys.executable,),
        **variables: str,
    ) -> Path:
        return self._call("resolve", [load, revision], cached, variables, python)

    def tokenizer(self, named: str, *, cached: bool = False, **variables: str) -> Path:
        return self._call("resolve_tokenizer", [named], cached, variables)

    def _call(
        self,
        function: str,
        arguments: list[str | None],
        cached: bool,
        variables: dict[str, str],
        python: tuple[str, ...] = (sys.executable,),
    ) -> Path:
        """Raises ConfigError as the call did."""
        asked = json.dumps([function, arguments, cached])
        given = {**self.environment, **variables}
        done = shardwise(asked, at=self.at, program=(*python, str(self.script)), **given)
        assert done.code == 0, done.err
        assert done.err == "", "progress bars are for terminals"
        assert TOKEN not in done.out, "the token is a secret"
        result = json.loads(done.out)
        self.said = result["said"]
        assert python != COLD or not result["torch"], "the launcher has no torch, and no time for it"
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
    assert len(user.said) == 1
    assert f"fetching acme/tiny from {site.address}: once" in user.said[0]
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
    with pytest.raises(ConfigError, match=r"acme/tiny at revision main.*must be in the cache of this machine"):
        user.resolve("acme/tiny", "main", cached=True)


def test_without_a_network_the_cache_serves(user: User) -> None:
    folder = user.resolve("acme/tiny")
    assert user.resolve("acme/tiny", HF_HUB_OFFLINE="1") == folder
    assert user.resolve("acme/tiny", HF_ENDPOINT="http://127.0.0.1:9") == folder
    with pytest.raises(
        ConfigError, match=r"HF_HUB_OFFLINE is set, and the cache .* lacks it; fetch it where there is access"
    ):
        user.resolve("acme/other", HF_HUB_OFFLINE="1")
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9 cannot be reached, and the cache") as caught:
        user.resolve("acme/other", HF_ENDPOINT="http://me:password@127.0.0.1:9")
    assert "password" not in str(caught.value)


def test_gated_missing_and_refused(user: User, site: Site) -> None:
    with pytest.raises(
        ConfigError, match=f"acme/gated.* is gated: accept its licence on {site.address}/acme/gated"
    ) as caught:
        user.resolve("acme/gated")
    assert "HF_TOKEN" in str(caught.value)
    assert user.resolve("acme/gated", HF_TOKEN=TOKEN).is_dir()
    with pytest.raises(ConfigError, match=r"checkpoint.revision \(v9\) must be a branch, tag or commit of acme/tiny"):
        user.resolve("acme/tiny", "v9")
    with pytest.raises(ConfigError, match=r"is no path, and .* no such repository .*HF_TOKEN"):
        user.resolve("acme/private")
    with pytest.raises(ConfigError, match=r"answers with status 401; set HF_TOKEN to a valid token"):
        user.resolve("acme/private", HF_TOKEN="hf_expired")
    with pytest.raises(ConfigError, match="answers with status 500"):
        user.resolve("acme/broken")


def test_a_repository_of_pickles_is_refused(user: User, site: Site) -> None:
    with pytest.raises(ConfigError, match=r"pickled \(pytorch_model.bin\): opening a pickle can run any code"):
        user.resolve("acme/tiny", "pickled")
    assert "pytorch_model.bin" not in site.fetched


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints/step-00000100").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000100/model.safetensors").write_bytes(b"")
    for step in ("step-00000100", "step-00000200"):
        (tmp_path / "run/checkpoints" / step).mkdir(parents=True)
        (tmp_path / "run/checkpoints" / step / "model.safetensors").write_bytes(b"")
    (tmp_path / "run/config.yaml").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"")
    (tmp_path / "weights.pt").write_bytes(b"")
    return tmp_path


PATHS = {
    "checkpoints/step-0000010": r"there is none of that name in .*did you mean checkpoints/step-00000100\?",
    "runs/latest": "there is none of that name in [^:;]*$",
    "a/b/c": "there is none of that name in ",
    "two words": "there is none of that name in .*, and a hub id reads owner/name",
    "weights.pt": r"pickled \(weights.pt\): opening a pickle can run any code .*save_pretrained",
    "pickled": r"pickled \(pytorch_model.bin\): opening a pickle can run any code .*save_pretrained",
    "empty": "must hold model.safetensors: it is empty",
    "checkpoints/step-00000100/model.safetensors": "it is a file: set checkpoint.load=checkpoints/step-00000100$",
}


@pytest.mark.parametrize("load", PATHS)
def test_what_is_no_folder_of_weights(load: str, here: Path) -> None:
    with pytest.raises(ConfigError, match=PATHS[load]) as caught:
        hub.resolve(load)
    assert f"checkpoint.load ({load}" in str(caught.value)


def test_a_path_is_taken_as_it_is(here: Path) -> None:
    assert hub.resolve("checkpoints/step-00000100") == Path("checkpoints/step-00000100")
    assert hub.resolve_tokenizer("empty") == Path("empty")
    assert hub.resolve_tokenizer("weights.pt") == Path("weights.pt")
    with pytest.raises(ConfigError, match=r"checkpoint.revision \(v1\) must be left out"):
        hub.resolve("checkpoints/step-00000100", "v1")
    with pytest.raises(ConfigError, match=r"data.tokenizer \(tokenizer.json\) must be a tokenizer's file or folder: "):
        hub.resolve_tokenizer("tokenizer.json")


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (
            {"a": "model-1.safetensors", "b": "model-2.safetensors"},
            "lacks model-2.safetensors: its index says that they hold weights: copy them",
        ),
        ({"a": "../model-1.safetensors"}, "must name files of its own folder, and '../model-1.saf"),
    ],
)
def test_an_index_is_checked(weights: dict[str, str], text: str, tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ConfigError, match=text):
        check_weights(tmp_path)


@pytest.mark.parametrize(
    ("names", "absent"),
    [
        (["model-00001-of-00003.safetensors"], ["model-00002-of-00003", "model-00003-of-00003"]),
        (["model-00001-of-00001.safetensors"], []),
        (["shard-00002-model-00002-of-00002.safetensors"],
         ["shard-00001-model-00001-of-00002", "shard-00002-model-00001-of-00002"]),
    ],
)  # fmt: skip
def test_missing_files_are_named_by_the_numbers_of_others(names: list[str], absent: list[str], tmp_path: Path) -> None:
    assert hub.absent_parts(names) == [f"{name}.safetensors" for name in absent]
    for name in names if absent and names[0].startswith("model") else ():
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ConfigError, match=rf"{name}; fetch or copy model\.safetensors\.index\.json.* too"):
            check_weights(tmp_path)


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
    with pytest.raises(ConfigError, match=r"\(acme/tiny@v1\) must hold a tokenizer, which is .*: it has config.json"):
        user.tokenizer("acme/tiny@v1")
    with pytest.raises(ConfigError, match=r"must hold a tokenizer, which is .*: it has config.json and vocab.json"):
        user.tokenizer("acme/tiny@half")
    with pytest.raises(ConfigError, match=r"the revision of data.tokenizer \(v9\) must be a branch, tag or commit of"):
        user.tokenizer("acme/tiny@v9")
    with pytest.raises(ConfigError, match=r"data.tokenizer \(acme/tiny@\) must have a branch, tag or commit after @"):
        user.tokenizer("acme/tiny@")
    with pytest.raises(ConfigError, match=r"data.tokenizer \(acme/tiny at revision v9\) must be in the cache of this"):
        user.tokenizer("acme/tiny@v9", cached=True)


LOOK = """
import json, sys
from shardwise.base import hub
from shardwise.base.errors import ConfigError
found = []
for named in sys.argv[1:]:
    try:
        found.append(hub.find(hub.place_of_tokenizer(named)))
    except ConfigError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def test_a_look_fetches_nothing(user: User, site: Site) -> None:
    """What a dry run does with a hub id."""
    named = ["acme/tiny", "acme/tiny@none", "acme/tiny@half", "acme/private", "acme/broken"]
    (user.at / "look.py").write_text(LOOK)
    look = (sys.executable, str(user.at / "look.py"))
    found = json.loads(shardwise(*named, at=user.at, program=look, **user.environment).succeeded().out)
    texts = ["hub", "must be a branch, tag", "must hold a tokenizer", "no such repository", "unknown"]
    assert [text for text, said in zip(texts, found, strict=True) if text not in said] == [], found
    assert site.fetched == []
    assert not list((user.at / "hf").rglob("tokenizer.json"))
    user.tokenizer("acme/tiny")
    site.requests.clear()
    again = {**user.environment, "HF_HUB_OFFLINE": "1"}
    found = json.loads(shardwise("acme/tiny", "acme/other", at=user.at, program=look, **again).succeeded().out)
    assert found == ["cache", "unknown"]
    assert site.requests == []


def test_a_path_is_no_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/wiki").mkdir(parents=True)
    told = r"data\.dataset \(data/wiki\) must be python or tiny or a hub id, it is a path: set data\.path=data/wiki"
    with pytest.raises(ConfigError, match=told):
        hub.place_of_dataset("data/wiki", ("python", "tiny"))


def test_a_disk_without_room_for_what_is_fetched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    download = hub.HubFiles.download

    def full(wanted: hub.HubFiles, *, local_files_only: bool = False) -> Path:
        if local_files_only:
            return download(wanted, local_files_only=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub.HubFiles, "download", full)
    with pytest.raises(
        ConfigError, match=r"\(acme/tiny\) cannot be fetched from http.* into .*: No space left on device"
    ):
        hub.resolve("acme/tiny", cached=False)


@pytest.mark.slow
def test_a_damaged_tokenizer_is_fetched_again(user: User, site: Site) -> None:
    """The hub's client looks whether a file is there, and at nothing else; also of a commit, which never changes."""
    for named in ("acme/tiny", f"acme/tiny@{site.commit('main')}"):
        file = user.tokenizer(named) / "tokenizer.json"
        file.resolve().write_bytes(b"[")
        assert (user.tokenizer(named) / "tokenizer.json").read_bytes() == b"[]", named
    assert site.fetched == ["tokenizer.json"] * 3


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
    assert hub.drop_damaged(tmp_path / "snapshot") == [tmp_path / "snapshot/deeper/cut off"]
    assert {path.name for path in (tmp_path / "blobs").iterdir()} == set(names.values()) - {names["cut off"]}
    assert hub.drop_damaged(tmp_path / "snapshot") == []


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
    monkeypatch.setattr(hub, "drop_damaged", lambda *_: [])
    monkeypatch.setattr(hub, "sys", SimpleNamespace(stderr=shown.stream))
    monkeypatch.setattr(hub.HubFiles, "download", download)
    for announce in (print, None):
        hub.resolve_tokenizer("acme/tiny", announce=announce)
    text = shown.text()
    assert text.startswith("" if isinstance(shown, Screen) else "fetching acme/tiny: 2.0 MiB, ")
    assert text.count("\n") == (not isinstance(shown, Screen))
