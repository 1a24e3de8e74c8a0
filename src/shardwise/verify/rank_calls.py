"""A function called on new ranks of this machine, whose results come back: the harness of measurements.

`verify`, `doctor` and `plan --calibrate` start ranks by `python -m` of this module, and import no
torch for it. Function, arguments and results pass as pickles through a folder that only this user can read.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import EndedError, LaunchError
from shardwise.launch.environment import keep_own
from shardwise.launch.local import launch
from shardwise.launch.rank_process import as_rank, enter_job

if TYPE_CHECKING:
    import torch

    from shardwise.distributed.mesh import Group

_CALL_FILE = "call.pickle"
_RESULTS_FILE = "results.pickle"


@dataclass(frozen=True)
class RankResults:
    """The results of rank 0 of called ranks, and the error that ended the ranks before they were done."""

    values: list[Any]  # the result of the function, or all that it yielded before the end
    failure: LaunchError | None  # None if all ranks have done their work

    def single(self) -> Any:
        """Return the only result; raise the failure if there is one."""
        if self.failure is not None:
            raise self.failure
        (value,) = self.values
        return value


def call_on_ranks(function: Callable[..., Any], *arguments: Any, ranks: int, folder: Path) -> RankResults:
    """Call `function(*arguments)` on each of `ranks` new processes, and return the results of rank 0.

    A generator's values are kept one by one, so that what was found before a failure is not lost. The function joins
    the ranks by `join_called_ranks`.

    Args:
        function: function of a module's top level, which each rank imports.
        folder: existing folder of this user alone, for the call, its results and the ranks' logs.

    Raises:
        EndedError: a signal of the user ended the ranks.
    """
    # Results of an earlier call in this folder would be taken for those of this one.
    (folder / _RESULTS_FILE).unlink(missing_ok=True)
    (folder / _CALL_FILE).write_bytes(pickle.dumps((function, arguments)))
    failure = None
    try:
        launch([sys.executable, "-P", "-m", __name__, str(folder)], ranks, folder)
    except EndedError:
        raise
    except LaunchError as error:
        failure = error
    return RankResults(list(_read_results(folder)), failure)


def _read_results(folder: Path) -> Iterator[Any]:
    """Yield the results so far, without a last one that its rank could not finish."""
    path = folder / _RESULTS_FILE
    if not path.exists():
        return
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                # The end of the file, or a value whose writer was killed.
                return


@contextmanager
def join_called_ranks(device: torch.device, timeout: float = 600.0) -> Iterator[Group]:
    """Join the ranks of this call for the body of the `with` statement, and yield the group of all.

    A rank on the CPU computes with one thread, as all ranks share the CPUs.

    Args:
        device: device on which this rank computes; it decides the backend.
        timeout: seconds after which a collective fails whose other ranks never call it.
    """
    import torch

    from shardwise.distributed.mesh import Group, join, leave

    if device.type == "cpu":
        torch.set_num_threads(1)
    join(device, timeout=timeout)
    yield Group.world()
    # Not in a `finally`: after an error other ranks may have ended, and would never answer.
    leave()


def main() -> int:
    """Do the call of a folder as one of its ranks: `python -m shardwise.verify.rank_calls FOLDER`."""
    # First, as the caller may be a rank of another job, whose variables are inherited.
    keep_own()
    place = enter_job(None)
    with as_rank(place) as ending:
        folder = Path(sys.argv[1])
        function, arguments = pickle.loads((folder / _CALL_FILE).read_bytes())
        result = function(*arguments)
        for value in result if inspect.isgenerator(result) else [result]:
            if place is None or place.rank == 0:
                # Opened for each value, so that it is in the file before the next one is computed.
                with (folder / _RESULTS_FILE).open("ab") as file:
                    pickle.dump(value, file)
    return ending.code


if __name__ == "__main__":
    sys.exit(main())
