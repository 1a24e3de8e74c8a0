"""Runs the programs of this environment on small models of every family, and compares with the record.

`READERS` names programs of other environments, as `transformers-4=PYTHON,vllm=PYTHON`. llama.cpp's converter is no
package: `LLAMA_CPP` names its sources (`vendor/llama.cpp` of llama-cpp-python's own). The record is written again
(`record.py`); where a program is right and was not, or the reverse, the test fails.

`draw.py` and `read.py NAME FOLDER` can be run one by one; what was read is kept. Seconds for a model, on a busy machine
of two cores: gguf 0.3, mlx-lm 0.2, transformers 4.5, ctranslate2 4.6, llama.cpp 4.7, transformers-4 6.9, vllm 12.8.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise_use import other_readers
from tests.interop.readers import draw, record

HERE = Path(__file__).parent
OTHERS = dict(pair.split("=", 1) for pair in os.environ.get("READERS", "").split(",") if pair)
NAMES = [
    "transformers",
    "gguf",
    "mlx-lm",
    "ctranslate2",
    *(["llama.cpp"] if os.environ.get("LLAMA_CPP") else []),
    *OTHERS,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("models")
    draw.main(at)
    return at


@pytest.mark.timeout(7200)
def test_the_record_is_what_programs_compute(folder: Path) -> None:
    known = {family: dict(lines) for family, lines in other_readers.reader_record()["lines"].items()}
    for name in NAMES:
        subprocess.run([OTHERS.get(name, sys.executable), HERE / "read.py", name, folder], check=True)
    record.main(folder)
    other_readers.reader_record.cache_clear()
    found = other_readers.reader_record()["lines"]
    changed = {
        (family, line, name): (known.get(family, {}).get(line, {}).get(name), result)
        for family, lines in found.items()
        for line, results in lines.items()
        for name, result in results.items()
        if other_readers.is_computed_right(result)
        != other_readers.is_computed_right(known.get(family, {}).get(line, {}).get(name))
    }
    assert not changed, f"the record was written again, run `make pages`: {changed}"
