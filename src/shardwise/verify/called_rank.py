"""A rank that `call_on_ranks` starts: `python -m shardwise.verify.called_rank FOLDER` does the call of this folder."""

from __future__ import annotations

import inspect
import pickle
import sys
from pathlib import Path

from shardwise.launch.environment import keep_own
from shardwise.launch.rank_process import as_rank, enter_job
from shardwise.verify.rank_calls import CALL_FILE, RESULTS_FILE


def main() -> int:
    # First, as the caller may be a rank of another job, whose variables are inherited.
    keep_own()
    place = enter_job(None)
    with as_rank(place) as ending:
        folder = Path(sys.argv[1])
        function, arguments = pickle.loads((folder / CALL_FILE).read_bytes())
        result = function(*arguments)
        for value in result if inspect.isgenerator(result) else [result]:
            if place is None or place.rank == 0:
                # Opened for each value, so that it is in the file before the next one is computed.
                with (folder / RESULTS_FILE).open("ab") as file:
                    pickle.dump(value, file)
    return ending.code


if __name__ == "__main__":
    sys.exit(main())
