"""An attempt at a job on hosts of their own networks (network namespaces), whose link is cut."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shardwise.launch.node import LauncherFacts
from shardwise_jobs.attempt import AttemptOutcome, AttemptWatch
from tests.e2e.command import environment, metrics, miniature

pytestmark = pytest.mark.slow

SILENCE = 10.0
HOST = """\
ip netns exec sw{number} env SLURM_NODEID={number} SLURMD_NODENAME=host{number} {command} &
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them; gives their addresses."""
    if shutil.which("ip") is None or os.getuid() != 0:
        assert not os.environ.get("CI"), "CI must run the tests with network namespaces"
        pytest.skip("network namespaces need root and the program ip (Debian: iproute2)")
    addresses = ("10.99.7.1", "10.99.7.2")
    try:
        for number, address in enumerate(addresses):
            ip("netns", "add", f"sw{number}")
            if number == 0:
                ip("link", "add", "swlink0", "netns", "sw0", "type", "veth", "peer", "name", "swlink1")
            else:
                ip("link", "set", "swlink1", "netns", "sw1")
            ip("-n", f"sw{number}", "addr", "add", f"{address}/24", "dev", f"swlink{number}")
            for device in (f"swlink{number}", "lo"):
                ip("-n", f"sw{number}", "link", "set", device, "up")
        yield addresses
    finally:
        for number in range(2):
            subprocess.run(["ip", "netns", "del", f"sw{number}"], check=False, capture_output=True)


SUPERVISE = """\
import asyncio, json, sys
from pathlib import Path
from tests.cluster.test_hosts import attempt
outcome = asyncio.run(attempt(sys.argv[1], sys.argv[2:]))
print(outcome.failure.text if outcome.failure else "none", outcome.lost, sep="\\n")
"""


async def attempt(address: str, command: Sequence[str]) -> AttemptOutcome:
    """One attempt on the two hosts, in the current folder."""

    def program(_attempt: LauncherFacts) -> list[str]:
        quoted = " ".join(command)
        return ["bash", "-c", "".join(HOST.format(number=n, command=quoted) for n in range(2)) + "wait"]

    watch = AttemptWatch(address, 2, 1, Path("run/logs"), id="1.0.0", silence=SILENCE, heard=lambda _: None)
    return await watch.run(program)


def test_a_cut_link_ends_the_attempt_in_time_and_names_the_host(hosts: tuple[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    keys = ("train.steps=100000", "train.eval_every=0", f"launch.timeout={SILENCE}", "log.tensorboard=false")
    train = [sys.executable, "-m", "shardwise", "train", str(miniature(tmp_path)), *keys]
    train += ["--nproc", "1", "--run-dir", str(run)]
    supervise = ["ip", "netns", "exec", "sw0", sys.executable, "-c", SUPERVISE, hosts[0], *train]
    root = str(Path(__file__).parents[2])
    variables = environment(PYTHONPATH=os.pathsep.join((os.environ.get("PYTHONPATH", ""), root)))
    job = subprocess.Popen(supervise, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or len(metrics(run, "step")) < 5:
            assert time.monotonic() < deadline, "no step"
            time.sleep(0.1)
        ip("-n", "sw1", "link", "set", "swlink1", "down")
        cut = time.monotonic()
        out, _ = job.communicate(timeout=120)
        seconds = time.monotonic() - cut
    finally:
        job.kill()
    # What ends first: rank 0 is told to, or its own wait of the same length.
    assert re.search(r"node host1 \(rank 1\) does not answer; rank 0 (waited in|lost the connection)", out), out
    assert "('host1',)" in out
    # The time-out, 5 s, and the end of the launchers, one of which cannot be told to end.
    assert seconds < SILENCE + 5 + 10, seconds
    print(f"named after {seconds:.1f} s at a time-out of {SILENCE:.0f} s")
