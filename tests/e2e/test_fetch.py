"""`shardwise data fetch` as a user runs it: killed, run again, and used."""

from pathlib import Path

import numpy as np

from tests.e2e import processes
from tests.e2e.command import outcome, shardwise, start
from tests.loopback_files import serve


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
