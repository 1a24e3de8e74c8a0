"""What many tests use: a finished run, and an object store."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwise.config import Config, load_config
from tests.e2e.command import CASES, Outcome, miniature, shardwise
from tests.loopback_s3 import serve

OF_THE_CPU = CASES["tests of CPU ranks"]
"""Tests that `--device` leaves out, as they say something of CPU ranks alone, each with what."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        reason = OF_THE_CPU.get(item.nodeid.partition("[")[0].removeprefix("tests/e2e/"))
        if reason is not None and config.getoption("--device") != "cpu":
            item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Trained:
    """A run at TP 2 with sequence parallelism: the folder it was started in, its own folder, what it printed."""

    at: Path
    run: Path
    outcome: Outcome
    config: Config


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    at = tmp_path_factory.mktemp("trained")
    overrides = ["parallel.tensor=2", "parallel.sequence=true", "precision.mode=float32"]
    secrets = {"HF_TOKEN": "hf_do_not_tell", "NCCL_LOGIN": "http://me:word@proxy"}
    outcome = shardwise("train", miniature(at), *overrides, at=at, **secrets)
    outcome.succeeded()
    run = (at / "runs/latest").resolve()
    return Trained(at, run, outcome, load_config(str(at / "miniature.yaml"), overrides))


@pytest.fixture(scope="session")
def object_store() -> Iterator[str]:
    """The address of an S3 server on loopback."""
    with serve() as address:
        yield address
