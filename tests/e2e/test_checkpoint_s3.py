"""The same code path on a real S3 interface: checkpoints are written, listed, verified, compared and removed there."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import python
from tests.loopback_s3 import BUCKET, user_of

USE = """
import json, sys
from shardwise.checkpoint.storage.root import Root, StoreError
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
