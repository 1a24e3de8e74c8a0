"""`make test-device`: what it refuses, and what it keeps of a pass."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import device_tests, write_docs

COUNTS = {"tests": 12, "skipped": 2}


@pytest.mark.parametrize("asked", ["", "cuda"])
def test_without_the_device_it_says_so(asked: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(device_tests.devices, "local_device", lambda: device_tests.torch.device("cpu"))
    monkeypatch.setenv("DEVICE", asked)
    assert device_tests.main([]) == 2
    error = capsys.readouterr().err
    assert f"must find {asked or 'an accelerator'} that torch" in error
    assert error.count("\n") == 1


def test_a_pass_replaces_that_of_the_same_device_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, page = tmp_path / "devices.json", tmp_path / "devices.md"
    page.write_text("before\n<!-- tested:begin -->\nold\n<!-- tested:end -->\nafter\n")
    for module in (device_tests, write_docs):
        monkeypatch.setattr(module, "RESULTS", results)
        monkeypatch.setattr(module, "DEVICES", page)
    device_tests.keep(device_tests.record("cpu", "CPU", COUNTS, "first"))
    device_tests.keep(device_tests.record("cpu", "CPU", COUNTS, "second"))
    assert "second" in page.read_text()
    assert "Nothing has been run on ROCm" in page.read_text()
    device_tests.keep(device_tests.record("cuda", "1 × H100", COUNTS, "third"))
    assert [row["commit"] for row in json.loads(results.read_text())] == ["second", "third"]
    assert [row["passed"] for row in json.loads(results.read_text())] == [10, 10]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("Nothing has been run on ROCm") == 1
