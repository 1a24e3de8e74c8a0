"""The process between the launcher and its ranks: torchrun's elastic agent, without torchrun's wall of text.

`python -m shardwise.launch.agent N DIR COMMAND …` runs COMMAND on N local ranks, beside those of the other nodes of the
job if the environment describes one (`node.py`). Torch's text about ranks that failed goes to DIR/launcher.log; their
exit codes go to DIR/exit-codes.json, which the launcher reads. Ranks inherit this process's own standard output and
error, so that rank 0 still writes to the terminal. Only this module of the package imports torch, and only inside
`main`.

This process ignores signals, which the launcher handles: SLURM sends a signal to every process of a job, and torch's
agent would then kill the ranks after 30 s, though a checkpoint may take longer. Only SIGKILL ends this process before
its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.base.files import write_atomic
from shardwise.launch import rank_process, stop_requests
from shardwise.launch.environment import PARENT_PID, launches_node
from shardwise.launch.first_failure import Failure, exit_codes_file, report_failure
from shardwise.launch.node import Node, this_node
from shardwise.runs.folder import open_log

_NATIVE_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_LOOPBACK = "shardwise-loopback"


def main() -> int:
    # First of all: the launcher may be killed while this process imports torch, which takes seconds.
    rank_process.die_with_parent()
    for number in stop_requests.SIGNALS:
        # A handler, because the ranks would inherit that a signal is ignored, and hear none themselves.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    nproc, logs, *command = sys.argv[1:]
    log_path = Path(logs) / "launcher.log"
    try:
        # Never closed: torch's loggers hold it, and what Python prints as it exits belongs there too.
        log = sys.stdout = sys.stderr = open_log(log_path)
    except ConfigError as error:
        report_failure(Failure(0, str(error), error.exit_code))
        return error.exit_code
    code = _run(command, int(nproc), Path(logs))
    if os.fstat(log.fileno()).st_size == 0:
        # Nothing was said. The file may be missing, as the run's folder may have been renamed.
        log_path.unlink(missing_ok=True)
    return code


def _run(command: list[str], nproc: int, logs: Path) -> int:
    is_quiet = _NATIVE_LOG_LEVEL not in os.environ
    if is_quiet:
        os.environ[_NATIVE_LOG_LEVEL] = "ERROR"
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if is_quiet:
        del os.environ[_NATIVE_LOG_LEVEL]
    # This process is the parent of the ranks: they end with it (`rank_process.die_with_parent`).
    os.environ[PARENT_PID] = str(os.getpid())
    config = LaunchConfig(
        nproc_per_node=nproc,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGQUIT",
        **_meeting(this_node() if launches_node() else None),
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        write_atomic(exit_codes_file(logs), json.dumps(exit_codes))
        return 1
    return 0


def _meeting(node: Node | None) -> dict[str, Any]:
    """Return the options by which the agents of a job meet.

    The ranks follow the order of SLURM's nodes, whose neighbours are near in the network. torch's rendezvous "c10d"
    would order the nodes by their addresses as texts; "static" is the same store of c10d with given numbers.
    """
    if node is None or node.attempt.nodes == 1:
        _register_loopback()
        alone = {"rdzv_backend": _LOOPBACK, "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
        return {"min_nodes": 1, "max_nodes": 1, "run_id": uuid.uuid4().hex, **alone}
    attempt = node.attempt
    return {
        "min_nodes": attempt.nodes,
        "max_nodes": attempt.nodes,
        "run_id": attempt.id,
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{attempt.address}:{attempt.port}",
        "rdzv_configs": {"rank": node.number},
        "local_addr": node.local_address,
    }


def _register_loopback() -> None:
    """Register a rendezvous of one agent with a store on the loopback interface; the stores of torch listen on all."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # stubs leave it out
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    from shardwise.distributed.rendezvous import listen

    class Loopback(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return _LOOPBACK

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:
                self._store = TCPStore(
                    self.master_addr, self.master_port, 1, True, self.timeout,
                    multi_tenant=True, master_listen_fd=listener.detach(),
                )  # fmt: skip
            return super().next_rendezvous()

    def make(parameters: RendezvousParameters) -> Loopback:
        return Loopback("127.0.0.1", listener.getsockname()[1], 0, 1, parameters.run_id, 600)

    listener = listen("127.0.0.1")
    rendezvous_handler_registry.register(_LOOPBACK, make)


if __name__ == "__main__":
    sys.exit(main())
