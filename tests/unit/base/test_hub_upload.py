"""`shardwise checkpoint export --push` through the hub's own protocol, and why it is refused."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import Outcome, shardwise
from tests.loopback_hub import TOKEN, Site, serve, user_of
from tests.stored import write_checkpoint


@pytest.fixture
def site() -> Iterator[Site]:
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


def test_an_export_is_uploaded_whole_and_private(tmp_path: Path, site: Site) -> None:
    done = push(tmp_path, site.address, "acme/mine", HF_TOKEN=TOKEN).succeeded()
    assert done.out.endswith(f"\nuploaded to {site.address}/acme/mine\n")
    assert TOKEN not in done.out + done.err
    exported = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "config.json", "model.safetensors"} <= exported.keys()
    assert site.uploaded == {"acme/mine": exported}


def test_many_files_are_one_commit(tmp_path: Path, site: Site) -> None:
    (tmp_path / "out").mkdir()
    files = {f"part-{number}.txt": b"%d" % number for number in range(260)}
    for name, content in files.items():
        (tmp_path / "out" / name).write_bytes(content)
    program = "import pathlib, shardwise.base.hub as h; h.upload(pathlib.Path('out'), 'acme/mine', 'a model')"
    variables = {**os.environ, **user_of(site.address, str(tmp_path / "hf")), "HF_TOKEN": TOKEN}
    variables["HF_HUB_DISABLE_XET"] = "0"  # as installed; small files need no server of it
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=variables, check=True)
    assert site.uploaded == {"acme/mine": files}
    assert sum(request.endswith("/commit/main") for request in site.requests) == 1


def test_without_a_token_that_may_write_it_is_refused(tmp_path: Path, site: Site) -> None:
    for repository, text in (
        ("acme/mine", f"--push (acme/mine) needs a token that may write: set HF_TOKEN, or run `hf auth login` "
         f"({site.address}/settings/tokens)"),
        ("mine", "--push (mine) must be a repository of the hub, owner/name, of letters"),
    ):  # fmt: skip
        assert text in push(tmp_path, site.address, repository).failed(2)
    assert not (tmp_path / "out").exists()
    assert site.requests == []
    said = push(tmp_path, site.address, "acme/mine", HF_TOKEN="hf_of_somebody_else").failed(1)
    assert f"out could not be uploaded as acme/mine: {site.address} refuses the token in use (status 401): set" in said
    assert (tmp_path / "out/model.safetensors").exists(), "what was written stays"
