"""Training with its checkpoints in an object store, as a user does it, against an S3 server on loopback."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.command import Outcome, imported_first, metrics, miniature, python, shardwise
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


@dataclass(frozen=True)
class Used:
    """A run in a bucket: killed while it saved step 3, finished at its layout, taken further by one process.

    Attributes:
        after_kill: names of all objects. weights: digest of those at the end of the resumed run.
    """

    at: Path
    user: dict[str, str]
    killed: Outcome
    resumed: Outcome
    after_kill: list[str]
    weights: str
    further: Outcome

    @property
    def run(self) -> Path:
        return self.at / "run"


NAMES = """
import json, sys
from shardwise.checkpoint.storage.root import Root
print(json.dumps(list(Root.of(sys.argv[1]).files())))
"""
DIGEST = """
import hashlib, sys
from shardwise.checkpoint.storage.root import Root
print(hashlib.sha256((Root.of(sys.argv[1]) / "step-00000004/model.safetensors").read()).hexdigest())
"""


@pytest.fixture(scope="module")
def used(object_store: str, tmp_path_factory: pytest.TempPathFactory) -> Used:
    at = tmp_path_factory.mktemp("remote")
    hook = imported_first(KILLED_MIDWAY, at / "hook")
    path = (f"checkpoint.path={URL}", "checkpoint.every=1", "checkpoint.keep=2", "--run-dir", "run")
    same = ("train", miniature(at), *QUIET, "parallel.tensor=2", "parallel.sequence=true", *path)
    user = {**user_of(object_store), "AWS_SECRET_ACCESS_KEY": SECRET}
    killed = shardwise(*same, at=at, **user, **hook)
    after_kill = json.loads(python(NAMES, URL, **user))
    resumed = shardwise(*same, at=at, **user)
    weights = python(DIGEST, URL, **user).strip()
    other = ("optimizer.zero=0", "train.steps=6", *path)
    further = shardwise("train", miniature(at), *QUIET, *other, at=at, **user)
    return Used(at, user, killed, resumed, after_kill, weights, further)


@pytest.mark.slow
def test_a_save_that_is_killed_midway_is_no_checkpoint(used: Used) -> None:
    used.killed.failed(1)
    assert "step-00000003/optimizer/rank-00000.safetensors" in used.after_kill, "the kill came before the save"
    manifests = [name for name in used.after_kill if name.endswith("manifest.json")]
    assert manifests == ["step-00000001/manifest.json", "step-00000002/manifest.json"]


@pytest.mark.slow
def test_a_resume_takes_the_one_before_and_is_exact(used: Used, trained: Trained) -> None:
    """To the bit, against a run on a disk that nobody killed."""
    assert used.resumed.code == 0, used.resumed.err
    first, _ = metrics(used.run, "resume")
    assert first["checkpoint"] == f"{URL}/step-00000002"
    assert any("step 3" in event["text"] for event in metrics(used.run, "warning")), "the user is not told of step 3"
    wanted = {event["step"]: event["loss"] for event in metrics(trained.run, "step")}
    found = {event["step"]: event["loss"] for event in metrics(used.run, "step") if event["step"] <= 4}
    assert found == wanted
    weights = (trained.run / "checkpoints/step-00000004/model.safetensors").read_bytes()
    assert used.weights == hashlib.sha256(weights).hexdigest(), "losses are equal, and the final weights differ"


@pytest.mark.slow
def test_another_layout_goes_on_from_the_bucket_and_old_ones_go(used: Used) -> None:
    assert used.further.succeeded()
    assert metrics(used.run, "resume")[-1]["checkpoint"] == f"{URL}/step-00000004"
    saved = [event for event in metrics(used.run, "checkpoint") if event["step"] > 4]
    assert [(event["path"], event["removed"]) for event in saved] == [
        (f"{URL}/step-00000005", [3]),
        (f"{URL}/step-00000006", [4]),
    ]
    folders = {name.partition("/")[0] for name in json.loads(python(NAMES, URL, **used.user))}
    assert folders == {"run.json", "step-00000005", "step-00000006"}, "objects of other steps, or a probe, are left"
    assert not (used.run / "checkpoints").exists()
    out = shardwise("checkpoint", "verify", URL, at=used.at, **used.user).succeeded().out
    assert out.count("intact") == 2, out
    for file in (each for each in used.run.rglob("*") if each.is_file()):
        assert SECRET.encode() not in file.read_bytes(), f"{file} has the secret key"


@pytest.mark.slow
def test_weights_alone_start_another_run(used: Used, tmp_path: Path) -> None:
    keys = (*QUIET, f"checkpoint.load={URL}/step-00000006", "train.stop_after=1", "log.sample_tokens=0")
    shardwise("train", miniature(tmp_path), *keys, "--run-dir", "other", at=tmp_path, **used.user).succeeded()
    begun, ended = metrics(tmp_path / "other", "eval")[0], metrics(used.run, "eval")[-1]
    assert begun["loss"] == pytest.approx(ended["loss"], rel=1e-6), "the loaded weights are not those of the checkpoint"


# ---- what is refused, before a step


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
def test_what_is_wrong_with_a_store_is_said_with_what_helps(used: Used, tmp_path: Path) -> None:
    recipe = str(miniature(tmp_path))
    there = used.user["AWS_ENDPOINT_URL"]
    bucket = ("path", there, "s3://no-such-bucket/run")
    cases = [bucket, ("path", "http://127.0.0.1:9", URL), ("load", there, URL), ("path", there, URL)]
    # The client tries again four times, for up to 15 s.
    once = {"AWS_MAX_ATTEMPTS": "1", **used.user}
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
def test_an_upload_in_parts_that_is_abandoned_leaves_nothing(used: Used) -> None:
    assert python(ABANDON, **used.user) == "1 0 False\n"
