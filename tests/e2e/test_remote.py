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
def test_a_resume_takes_the_checkpoint_before_and_is_exact(used: Path, trained: Trained) -> None:
    """To the bit, against a run on a disk that nobody killed."""
    (resume,) = metrics(used / "run", "resume")
    assert resume["checkpoint"] == f"{URL}/step-00000002"
    assert any("step 3" in event["text"] for event in metrics(used / "run", "warning")), "step 3 is left out in silence"
    found, wanted = ([event["loss"] for event in metrics(run, "step")] for run in (used / "run", trained.run))
    assert found[-2:] == wanted[-2:]


@pytest.mark.slow
def test_another_layout_goes_on_from_the_bucket_and_old_ones_go(used: Path, user: dict[str, str]) -> None:
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
