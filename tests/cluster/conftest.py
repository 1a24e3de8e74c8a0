"""One SLURM for the tests of this folder."""

import os
from collections.abc import Iterator

import pytest

from tests.cluster.slurm import Slurm, lacking, running


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes. Where SLURM is missing the tests are skipped, but never in CI, which must install it."""
    problem = lacking()
    if problem is not None:
        assert not os.environ.get("CI"), f"CI must run the tests with SLURM: {problem}"
        pytest.skip(f"SLURM cannot be started: {problem}")
    with running(tmp_path_factory.mktemp("slurm"), 2) as cluster:
        yield cluster
