"""Training with its checkpoints in an object store, as a user does it, against an S3 server on loopback."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import imported_first, metrics, miniature, python, shardwise
from tests.e2e.conftest import Trained
from tests.loopback_s3 import BUCKET, user_of

URL = f"s3://{BUCKET}/run"
SECRET = "open-sesame-123"
KILLED_MIDWAY = """
import os, signal
if os.environ.get("RANK") == "1":
    from shardwise.checkpoint.storage.chunks import ChunkedWriter
    close = ChunkedWriter.close
    def closing(self):
        if "step-00000003" in str(self._file._root):
            os.kill(os.getpid(), signal.SIGKILL)
        return close(self)
    ChunkedWriter.close = closing
"""
QUIET = ("log.tensorboard=false", "precision.mode=float32")


NAMES = """
import json, sys
from shardwise.checkpoint.storage.root import Root
print(json.dumps(list(Root.of(sys.argv[1]).files())))
"""
PATH = (f"checkpoint.path={URL}", "checkpoint.every=1", "checkpoint.keep=2", "--run-dir", "run")


@pytest.fixture(scope="module")
def user(object_store: str) -> dict[str, str]:
    return {**user_of(object_store), "AWS_SECRET_ACCESS_KEY": SECRET}


@pytest.fixture(scope="module")
def used(user: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in a bucket: killed while it saved step 3, and finished at its layout."""
    at = tmp_path_factory.mktemp("remote")
    hook = imported_first(KILLED_MIDWAY, at / "hook")
    same = ("train", miniature(at), *QUIET, "parallel.tensor=2", "parallel.sequence=true", *PATH)
    shardwise(*same, at=at, **user, **hook).failed(1)
    after_kill = json.loads(python(NAMES, URL, **user))
    assert "step-00000003/optimizer/rank-00000.safetensors" in after_kill, "the kill came before the save"
    manifests = [name for name in after_kill if name.endswith("manifest.json")]
    assert manifests == ["step-00000001/manifest.json", "step-00000002/manifest.json"], "no checkpoint of step 3"
    resumed = shardwise(*same, at=at, **user)
    assert resumed.code == 0, resumed.err
    return at


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_at_both_layouts(used: Path, trained: Trained, user: dict[str, str]) -> None:
    """To the bit, against a run on a disk that nobody killed."""
    (resume,) = metrics(used / "run", "resume")
    assert resume["checkpoint"] == f"{URL}/step-00000002"
    assert any("step 3" in event["text"] for event in metrics(used / "run", "warning")), "step 3 is left out in silence"
    found, wanted = ([event["loss"] for event in metrics(run, "step")] for run in (used / "run", trained.run))
    assert found[-2:] == wanted[-2:]
    other = ("train", "miniature.yaml", *QUIET, "optimizer.zero=0", "train.steps=6", *PATH)
    shardwise(*other, at=used, **user).succeeded()
    run = used / "run"
    assert metrics(run, "resume")[-1]["checkpoint"] == f"{URL}/step-00000004"
    saved = [(event["path"], event["removed"]) for event in metrics(run, "checkpoint") if event["step"] > 4]
    assert saved == [(f"{URL}/step-00000005", [3]), (f"{URL}/step-00000006", [4])]
    folders = {name.partition("/")[0] for name in json.loads(python(NAMES, URL, **user))}
    assert folders == {"run.json", "step-00000005", "step-00000006"}, "objects of other steps, or a probe, are left"
    assert not (run / "checkpoints").exists()
    out = shardwise("checkpoint", "verify", URL, at=used, **user).succeeded().out
    assert out.count("intact") == 2, out
    for file in (each for each in run.rglob("*") if each.is_file()):
        assert SECRET.encode() not in file.read_bytes(), f"{file} has the secret key"


LOOK = """
import json, os, sys
from pathlib import Path
import s3fs
from shardwise.config import load_config
from shardwise.base.errors import ConfigError
from shardwise.runs.folder import RunDirectory
from shardwise.checkpoint.storage.checkpoint_folders import load_location
from shardwise.train.resume import checkpoints_at_start
said = []
for key, address, url in json.loads(sys.argv[2]):
    os.environ["AWS_ENDPOINT_URL"] = address
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        if key == "load":
            said.append(load_location(url))
        else:
            checkpoints_at_start(load_config(sys.argv[1], [f"checkpoint.path={url}"]), RunDirectory("none"), None)
    except ConfigError as error:
        said.append(str(error))
print(json.dumps(said))
"""


@pytest.mark.slow
def test_what_is_wrong_with_a_store_is_said_with_what_helps(used: Path, user: dict[str, str]) -> None:
    recipe, there = str(used / "miniature.yaml"), user["AWS_ENDPOINT_URL"]
    bucket = ("path", there, "s3://no-such-bucket/run")
    cases = [bucket, ("path", "http://127.0.0.1:9", URL), ("load", there, URL), ("path", there, URL)]
    # The client tries again four times, for up to 15 s.
    once = {"AWS_MAX_ATTEMPTS": "1", **user}
    missing, endpoint, load, taken = json.loads(python(LOOK, recipe, json.dumps(cases), **once))
    assert missing.startswith("checkpoint.path: s3://no-such-bucket/run/.probe-")
    assert "cannot be written: The specified bucket does not exist; make the bucket" in missing
    assert endpoint.startswith(f"checkpoint.path: {URL} cannot be read: Could not connect to the endpoint URL")
    assert "; set AWS_ENDPOINT_URL to " in endpoint
    assert load == f"{URL}/step-00000006"
    assert taken.startswith(f"checkpoint.path ({URL}) must be empty for a new run, it has a checkpoint of step 6: ")


ABANDON = f"""
import boto3
from shardwise.checkpoint.storage.root import Root
file = (Root.of("{URL}") / "large").open(60 * 2**20)
for _ in range(60):
    file.write(bytes(2**20))
client = boto3.client("s3")
begun = client.list_multipart_uploads(Bucket="{BUCKET}").get("Uploads", [])
file.abandon()
left = client.list_multipart_uploads(Bucket="{BUCKET}").get("Uploads", [])
print(len(begun), len(left), (Root.of("{URL}") / "large").exists())
"""


@pytest.mark.slow
def test_an_upload_in_parts_that_is_abandoned_leaves_nothing(user: dict[str, str]) -> None:
    assert python(ABANDON, **user) == "1 0 False\n"


USE = """
import json, sys
from shardwise.base.errors import StoreError
from shardwise.checkpoint.storage.root import Root
root = Root.of(sys.argv[1]) / "odd [name] *"
root.make()
file = (root / "inner/a").open(3)
file.write(b"one")
file.close()
(root / "b").write(b"second")
(Root.of(sys.argv[1]) / "odd x y").write(b"stays")
file = (root / "c").open()
file.write(bytes(2**20))
file.abandon()
found = [root.names(), root.files(), (root / "b").read(1, 3).decode(), root.is_folder(), (root / "none").exists()]
(root / "b").rename(root / "d")
found.append(root.names())
root.remove()
root.remove()
found += [root.exists(), Root.of(sys.argv[1]).names()]
for action in ((root / "gone").size, (root / "gone").read, (Root.of("s3://no-such-bucket/x") / "y").open().close):
    try:
        action()
    except StoreError as error:
        found.append([str(error), error.missing])
print(json.dumps(found))
"""


def test_places_in_an_object_store(object_store: str) -> None:
    url = f"s3://{BUCKET}/places"
    found = json.loads(python(USE, url, **user_of(object_store)))
    assert found[:8] == [
        ["b", "inner"], {"b": 6, "inner/a": 3}, "ec", True, False, ["d", "inner"], False, ["odd x y"]
    ]  # fmt: skip
    for text, missing in found[8:10]:
        assert missing
        assert text.startswith(f"{url}/odd [name] */gone cannot be read: ")
    assert found[10][0].startswith("s3://no-such-bucket/x/y cannot be written: ")
    assert "AWS_ENDPOINT_URL" in found[10][0]


FETCH = """
import contextlib, io, json, os, sys
import s3fs
from shardwise.cli import main
owner = s3fs.S3FileSystem()
for name in ("open", "closed"):
    owner.pipe_file(f"bucket/public/{name}.txt", b"hello")
owner.chmod("bucket/public/open.txt", "public-read")
found = {}
for who, name, *options in (
    ("owner", "closed.txt"), ("nobody", "open.txt", "--anonymous"), ("nobody", "open.txt"),
    ("nobody", "closed.txt", "--anonymous"), ("nobody", "clo*", "--anonymous"), ("nobody", "none.txt", "--anonymous"),
):
    if who == "nobody":
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            os.environ.pop(key, None)
    s3fs.S3FileSystem.clear_instance_cache()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["data", "fetch", f"s3://bucket/public/{name}", f"{sys.argv[1]}/{who}/", *options])
    found[" ".join([who, name, *options])] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_public_bucket_is_read_without_credentials(object_store: str, tmp_path: Path) -> None:
    user = user_of(object_store) | {"HOME": str(tmp_path)}  # without anybody's configuration
    found = json.loads(python(FETCH, str(tmp_path), **user))
    assert found["owner closed.txt"][0] == found["nobody open.txt --anonymous"][0] == 0, found
    assert (tmp_path / "nobody/open.txt").read_bytes() == b"hello"
    assert not (tmp_path / "nobody/closed.txt").exists()
    refusals = {
        "nobody open.txt": (
            "open.txt cannot be read: Unable to locate credentials; set AWS_ACCESS_KEY_ID",
            "it is public, read it by --anonymous",
        ),
        "nobody closed.txt --anonymous": ("Forbidden; it is not public: leave out --anonymous; set AWS_ACC",),
        "nobody clo* --anonymous": ("Forbidden; it is not public: leave out --anonymous; set AWS_ACC",),
        "nobody none.txt --anonymous": ("s3://bucket/public/none.txt cannot be read: ",),
    }
    for asked, texts in refusals.items():
        code, out, err = found[asked]
        assert (code, out, err.count("\n")) == (2, "", 1), (asked, code, err)
        assert all(text in err for text in texts), (asked, err)
