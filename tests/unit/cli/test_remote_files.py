"""Files come whole and once, whatever happens on the way; and places that do not answer or hold something else."""

import hashlib
import json
import multiprocessing
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwise.base.errors import ConfigError, StoreError
from shardwise.checkpoint.format.manifest import MANIFEST
from shardwise.checkpoint.storage import root as reach
from shardwise.checkpoint.storage.root import Root
from shardwise.cli.data.remote_files import FetchedFile, fetch_remote_file, find_remote_files
from tests.command_line import CommandLine
from tests.loopback_files import Server, serve
from tests.stored import write_checkpoint

CONTENT = np.random.default_rng(0).bytes(5_000_000)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    with serve(CONTENT) as started:
        yield started


def get(url: str, target: Path, *arguments: Any, **options: Any) -> FetchedFile:
    (remote,) = find_remote_files(url)
    return fetch_remote_file(remote, target, *arguments, **options)


def test_a_file_comes_whole_and_once(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "new" / "data.bin"
    came: list[int] = []
    assert get(server.url, target, progress=came.append) == FetchedFile(target, len(CONTENT), DIGEST, True)
    assert target.read_bytes() == CONTENT
    assert sum(came) == len(CONTENT)
    assert get(server.url, target) == FetchedFile(target, len(CONTENT), DIGEST, False)
    assert server.requests.count("GET") == 1, "it is fetched again though it is there"
    assert sorted(path.name for path in target.parent.iterdir()) == [".data.bin.lock", "data.bin"]


@pytest.mark.parametrize("failure", ["refused", "cut short"])
def test_a_transfer_that_breaks_off_leaves_nothing(failure: str, server: Server, tmp_path: Path) -> None:
    if failure == "refused":
        server.fails = True
    else:
        server.cut_at = 1_000_000
    with pytest.raises(StoreError, match=r"data\.bin cannot be read: "):
        get(server.url, tmp_path / "data.bin")
    assert [path.name for path in tmp_path.iterdir()] == [".data.bin.lock"]
    server.fails, server.cut_at = False, None
    (tmp_path / ".data.bin.fetch").write_bytes(CONTENT[:1000])  # as a killed process leaves it
    assert get(server.url, tmp_path / "data.bin", DIGEST).is_new
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_the_digest_is_checked_and_another_file_is_kept(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "data.bin"
    with pytest.raises(ConfigError) as caught:
        get(server.url, target, "0" * 64)
    assert caught.value.problems == [
        f"{server.url}: its SHA-256 ({DIGEST}) must be that which was asked for ({'0' * 64}): it is another file, or "
        "changed on its way"
    ]
    assert [path.name for path in tmp_path.iterdir()] == [".data.bin.lock"], "what is wrong is kept"
    target = tmp_path / "data.bin"
    target.write_text("mine")
    with pytest.raises(ConfigError, match=r"data.bin is there, and its size .* replace it by --force"):
        get(server.url, target)
    assert target.read_text() == "mine"
    get(server.url, target, force=True)
    assert target.read_bytes() == CONTENT
    (tmp_path / "copy.bin").write_bytes(CONTENT)
    assert get(server.url, tmp_path / "copy.bin", DIGEST).is_new is False, "a file of that SHA-256 is the file"


BAD_PLACES = {
    "{server}/nothing": (ConfigError, r"nothing cannot be read: there is no such file"),
    "http://127.0.0.1:9/data.bin": (StoreError, r"cannot be read: .*[Cc]onnect"),
    "{folder}/*.hdf5": (ConfigError, "must match a file or more, and it matches none"),
    "{folder}/empty": (ConfigError, "must hold files, and the folder has none"),
}


def test_what_is_wrong_is_said_before_anything_comes(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "empty").mkdir()
    for place, (kind, text) in BAD_PLACES.items():
        with pytest.raises(kind, match=text):
            find_remote_files(place.format(server=server.address, folder=tmp_path))
    with pytest.raises(ConfigError, match=r"--anonymous must be left out with https://x/y: it is for s3, s3a, "):
        find_remote_files("https://x/y", anonymous=True)
    server.status = 403
    with pytest.raises(StoreError, match=r"data\.bin cannot be read: its server answers 403 \(Forbidden\)"):
        find_remote_files(server.url)
    server.status = 200
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for target, kind in ((tmp_path, "folder"), (tmp_path / "link", "link")):
        with pytest.raises(ConfigError, match=f"must be a file or a free name, and it is a {kind}"):
            get(server.url, target)
    server.requests.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError) as caught:
        get(server.url, tmp_path / "data.bin")
    assert caught.value.problems == [
        f"{tmp_path} (1000 B free) must have room for {server.url} (4.8 MiB): make room, or name a place on another "
        "disk"
    ]
    assert "GET" not in server.requests


def test_folders_and_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "from"
    (folder / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt", "d.bin"):
        (folder / name).write_text(name)
    assert [remote.name for remote in find_remote_files(str(folder))] == ["a.txt", "b.txt", "d.bin", "deep/c.txt"]
    found = find_remote_files(f"{folder}/*.txt")
    assert [(remote.name, remote.size) for remote in found] == [("a.txt", 5), ("b.txt", 5)]
    assert fetch_remote_file(found[1], tmp_path / "to" / "b.txt").path.read_text() == "b.txt"


@pytest.mark.parametrize("pattern", ["s3://bucket/data/**"])
def test_no_key_of_an_object_store_leads_out_of_the_folder(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["a.txt", "sub/", "../../x.txt", "/abs/path.txt", "b/..", "c\0.txt"]
    infos = {f"bucket/data/{key}": {"type": "file", "size": 0 if key[-1] == "/" else 2} for key in keys}
    found = lambda *_, **__: infos  # noqa: E731
    store = SimpleNamespace(info=lambda _: {"type": "directory"}, find=found, glob=found)
    root = Root("bucket/data" + pattern.removeprefix("s3://bucket/data"), pattern, "s3", store)
    monkeypatch.setattr(Root, "of", staticmethod(lambda url, anonymous: root))
    with pytest.raises(ConfigError) as caught:
        find_remote_files(pattern)
    (problem,) = caught.value.problems
    assert "'..' leads out of its folder" in problem or "'../../x.txt' leads out of its folder" in problem
    assert "must lie in the folder that it is fetched to: nothing was fetched" in problem
    assert "\0" not in problem
    for key in keys[2:]:
        del infos[f"bucket/data/{key}"]
    assert [remote.name for remote in find_remote_files(pattern)] == ["a.txt"], "the marker of a folder is no file"


@pytest.mark.parametrize("kind", ["fetch", "lock"])
def test_a_planted_link_is_not_followed(kind: str, server: Server, tmp_path: Path) -> None:
    target, victim = tmp_path / "to" / "data.bin", tmp_path / "victim"
    link = target.with_name(f".data.bin.{kind}")
    target.parent.mkdir()
    victim.write_bytes(CONTENT[:1000])
    link.symlink_to(victim)
    if kind == "lock":
        with pytest.raises(StoreError, match=r"data\.bin cannot be written: \.data\.bin\.lock is a link"):
            get(server.url, target)
        link.unlink()
    assert get(server.url, target, DIGEST).sha256 == DIGEST
    assert target.read_bytes() == CONTENT
    assert victim.read_bytes() == CONTENT[:1000], "a file elsewhere was written"
    assert not any(path.is_symlink() for path in target.parent.iterdir())


def test_a_presigned_url_is_shown_nowhere(server: Server, tmp_path: Path) -> None:
    signed = f"{server.url}?X-Amz-Date=2026&X-Amz-Signature=5ecret"
    server.fails = True
    with pytest.raises(StoreError) as caught:
        get(signed, tmp_path / "data.bin")
    assert str(caught.value).startswith(f"{server.url}?(redacted) cannot be read: ")


def _fetch_apart(url: str, target: str, told: Any) -> None:
    found = get(url, Path(target), announce=told.put)
    told.put(json.dumps([found.sha256, found.is_new]))


def test_processes_at_once_make_one_download_of_a_removed_file(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "data.bin"
    get(server.url, target)
    target.unlink()
    server.requests.clear()
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    started = [context.Process(target=_fetch_apart, args=(server.url, str(target), told)) for _ in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join(240)
    lines = [told.get(timeout=60) for _ in range(4)] if not told.empty() else []
    while not told.empty():
        lines.append(told.get())
    results = sorted(json.loads(line) for line in lines if line.startswith("["))
    assert [process.exitcode for process in started] == [0] * 4
    assert results == sorted([[DIGEST, False]] * 3 + [[DIGEST, True]]), lines
    assert server.requests.count("GET") == 1, "more than one download"
    assert target.read_bytes() == CONTENT


def test_inputs_of_one_file(tmp_path: Path, cli: CommandLine) -> None:
    Root.of("memory://two/a.txt").write(b"a")
    Root.of("memory://two/b.txt").write(b"b")
    for given, text in (
        ("12ab", "--sha256 (12ab) must be 64 hexadecimal digits"),
        ("0" * 64, "--sha256 must be left out: memory://two/ is 2 files, and it is of one"),
    ):
        assert text in cli.refused("data", "fetch", "memory://two/", tmp_path / "there", "--sha256", given)
    assert not (tmp_path / "there").exists()
    given = ["--format", "megatron", "--token-dtype", "uint16", "--eod-token", "0"]
    said = cli.refused("data", "prepare", tmp_path, tmp_path / "made", *given)
    assert f"INPUT ({tmp_path}) must be a file of raw tokens" in said


URL = "memory://far/run"


def test_a_silent_place_is_given_up(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setattr(reach, "PATIENCE_SECONDS", 0.01)
    exists = Root.exists
    monkeypatch.setattr(Root, "exists", lambda root: exists(root) if root.is_local else threading.Event().wait())
    for words, code in (
        (["checkpoint", "inspect", URL], 1),
        (["checkpoint", "diff", URL, URL], 2),  # 1 is a difference
        (["checkpoint", "export", URL, "out"], 1),
        (["evaluate", URL], 1),
        (["generate", URL, "--prompt", "a"], 1),
    ):
        assert cli(*words, code=code).err == f"shardwise: {URL} cannot be reached: no answer within 0 s\n"


def test_a_path_that_may_not_be_entered_is_wrong_input(own_folder: Path, cli: CommandLine) -> None:
    """A link to itself stands for all of them: the superuser may enter every folder."""
    (own_folder / "loop").symlink_to("loop")
    for command in ("checkpoint inspect", "checkpoint export", "data fetch", "evaluate", "stop"):
        target = ["out"] if command in ("checkpoint export", "data fetch") else []
        assert "loop" in cli.refused(*command.split(), "loop", *target), command


def test_one_checkpoint_is_not_pruned_and_none_is_not_verified(tmp_path: Path, cli: CommandLine) -> None:
    folder = write_checkpoint(tmp_path)
    said = cli.refused("checkpoint", "prune", folder, "--keep", "1")
    assert f"RUN ({folder}) must be a run's folder or a folder of checkpoints: it is one checkpoint" in said
    assert folder.exists()
    (folder / MANIFEST).local().unlink()
    said = cli.refused("checkpoint", "verify", tmp_path)
    assert f"{tmp_path} must hold a checkpoint that was completed: there is none" in said
