"""`shardwise data fetch` as a user runs it: killed, run again, and used."""

from pathlib import Path

import numpy as np

from tests.e2e import processes
from tests.e2e.command import outcome, shardwise, start
from tests.loopback_files import serve

TEXT = b"".join(b"In spring there lived monk %d in the monastery.\n" % number for number in range(2000))


def test_a_text_is_fetched_and_trained_on(tmp_path: Path) -> None:
    with serve(TEXT) as site:
        said = shardwise("data", "fetch", site.url, "texts/", at=tmp_path).succeeded()
        assert said.out.startswith("texts/data.bin: 96.6 KiB, SHA-256 ")
        assert said.out.endswith(", 96.6 KiB came\n")
        digest = said.out.split("SHA-256 ")[1].split(",")[0]
        again = shardwise("data", "fetch", site.url, "texts/data.bin", "--sha256", digest, at=tmp_path).succeeded()
        assert again.out.endswith(", was there already\n")
        wrong = shardwise("data", "fetch", site.url, "other.bin", "--sha256", "0" * 64, at=tmp_path).failed(2)
        assert "must be that which was asked for" in wrong
        assert shardwise("data", "fetch", f"{site.address}/none", ".", at=tmp_path).failed(2) == (
            f"shardwise: {site.address}/none cannot be read: there is no such file or folder\n"
        )
        site.status = 503
        assert "its server answers 503" in shardwise("data", "fetch", site.url, "new.bin", at=tmp_path).failed(1)
    options = ["data.path=texts/data.bin", "data.format=text", "train.stop_after=1", "train.eval_every=0"]
    shardwise("train", "gpt-tiny", "model.vocab_size=300", *options, at=tmp_path).succeeded()


def test_a_killed_fetch_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(40 << 20)
    target, part = tmp_path / "data.bin", tmp_path / ".data.bin.fetch"
    with serve(content) as site:
        site.waits_at = 24 << 20
        process = start("data", "fetch", site.url, "data.bin", at=tmp_path)
        assert processes.wait_for(lambda: part.exists() and part.stat().st_size > 8 << 20, 60)
        process.kill()
        outcome(process)
        site.goes_on.set()
        assert not target.exists()
        shardwise("data", "fetch", site.url, "data.bin", at=tmp_path).succeeded()
    assert target.read_bytes() == content
    assert not part.exists()
