"""How long a rank waits for others is measured in seconds in which it ran."""

import gc
import os
import socket
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from shardwise.distributed import wait_limit
from shardwise.distributed.wait_limit import WaitLimit, close_connections


def test_fault_23_a_wait_is_over_after_its_seconds_of_running_time() -> None:
    watch = WaitLimit(3.0)
    assert [watch.is_over(1.0, {7: 5}) for _ in range(4)] == [False, False, False, True]
    for second in [{7: 6}, {}, {8: 5}]:
        watch = WaitLimit(2.0)
        seen = [{7: 5}, {7: 5}, second, second, {7: 9}]
        assert not any(watch.is_over(1.0, waiting) for waiting in seen)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fault_23_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by 100 s in each pause of a tenth of the limit."""
    times = iter(range(0, 10**6, 100))
    monkeypatch.setattr(wait_limit.time, "monotonic", lambda: float(next(times)))
    monkeypatch.setattr(wait_limit.time, "sleep", lambda _: None)
    monkeypatch.setattr(wait_limit, "_waiting", lambda: {1: 1})
    monkeypatch.setattr(wait_limit, "close_connections", lambda: None)
    monkeypatch.setattr(wait_limit.os, "_exit", lambda _: None)
    wait_limit._run(6.0)
    assert next(times) // 200 == 6, "six pauses of at most 1.2 s each"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fault_23_what_waits_on_a_connection_goes_on_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that this process has opened only these two are looked at."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    with server, client, accepted:
        ours = [wait_limit.Path(f"/proc/self/fd/{one.fileno()}") for one in (server, client)]
        monkeypatch.setattr(wait_limit.Path, "iterdir", lambda _: iter(ours))
        heard: list[bytes] = []
        waiting = threading.Thread(target=lambda: heard.append(client.recv(1)))
        waiting.start()
        close_connections()
        waiting.join(30)
        assert heard == [b""]
        socket.create_connection(server.getsockname()).close()


def test_a_watch_keeps_nothing_of_the_threads_that_it_looks_at() -> None:
    """A frame of the function that looks would keep itself, and with it the frames and tensors of all threads."""

    def looked_at() -> weakref.ref[torch.Tensor]:
        value = torch.zeros(1)
        wait_limit._waiting()
        return weakref.ref(value)

    gc.disable()
    try:
        assert looked_at()() is None
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_wait_that_hears_nothing_of_closed_connections_ends_the_process() -> None:
    """So does gloo's wait for a connection to a rank that was killed while the ranks made a group."""
    code = """
import torch
from shardwise.distributed import wait_limit
wait_limit._DEAF_SECONDS = 0.2
wait_limit.start_wait_limit(0.2)
torch.futures.Future().wait()
"""
    environment = {**os.environ, "RANK": "3"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    said = "rank 3 waited for another rank for 0.2 s (launch.timeout), and ends\n"
    assert (ended.returncode, ended.stderr) == (1, said)
