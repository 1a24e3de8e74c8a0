"""Tasks that processes share out."""

import os

import pytest

from shardwise.base.errors import RunError
from shardwise.data.prepare.tokenizing import TokenizingWorkers


def test_results_come_in_the_order_of_tasks() -> None:
    with TokenizingWorkers.processes(2, None) as workers:
        assert list(workers.each(abs, range(-20, 0))) == [(task, -task) for task in range(-20, 0)]


def test_a_process_that_ends_is_told_of() -> None:
    with (
        TokenizingWorkers.processes(1, None) as workers,
        pytest.raises(RunError, match="a process that prepares data has ended early"),
    ):
        list(workers.each(os._exit, [3]))
