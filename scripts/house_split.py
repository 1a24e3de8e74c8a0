"""Print the lines of each part of the source, and the pairs of files by which one part imports another.

`house_split.py [SRC] [-v]`, where SRC holds the packages. A package beside the core (`shardwise_NAME`) is part NAME.
The patterns say which files of the core belong to a part that is no package yet; `-v` lists the core's pairs.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

CORE = "shardwise"
_PLAN_IN_CORE = (
    "memory", "memory_choice", "activations", "rank_workload", "sharding", "bucket_shapes", "block_shape", "run_stages",
    "__init__",
)  # fmt: skip
PATTERNS = {
    "plan": ("planner/*", "cli/plan*", "verify/calibrat*", "pipeline/makespan.py", "pipeline/timeline.py"),
    "watch": (
        "runs/screen/*", "runs/report/*", "runs/prometheus.py", "runs/rank_views.py", "runs/lost_time.py",
        "runs/layout_spans.py", "runs/run.py", "runs/summary.py", "cli/top.py", "cli/report.py", "cli/monitor.py",
        "cli/ls.py", "cli/compare.py",
    ),
    "jobs": ("launch/slurm/*", "cli/submit.py", "cli/jobs.py", "cli/supervise.py"),
    "use": (
        "train/generation.py", "train/conversation.py", "train/inference_jobs.py", "cli/chat.py", "cli/converse.py",
        "cli/generate.py", "cli/sampling.py", "launch/channel.py", "train/task_*",
        "cli/evaluate.py", "checkpoint/importing/*", "cli/checkpoint/import_.py",
    ),
    "data": (
        "data/reading/*", "data/tokens/*", "data/prepare/*", "data/cache.py", "data/preview.py",
        "data/formats/text.py", "data/formats/chat.py", "data/formats/datasets.py", "data/formats/hdf5.py",
        "data/formats/streamed_text.py", "data/formats/packing_cache.py", "data/formats/inspections.py",
        "data/evaluation_tasks.py",
        "data/held_out.py", "cli/data/*", "data/samples/text_stream.py", "data/samples/sentence_pairs.py",
        "data/samples/sentences.py", "data/samples/chat_batches.py",
    ),
}  # fmt: skip
"""Patterns of a part that has a package are not used."""

Pairs = defaultdict[tuple[Path, Path], set[str]]
"""The names that a file imports of another one."""


def parts_of_files(source: Path) -> dict[str, tuple[Path, str]]:
    """The file and the part of each module, by its name."""
    packages = {path.name.removeprefix(f"{CORE}_") for path in source.glob(f"{CORE}_*")}
    modules = {}
    for path in sorted(source.glob(f"{CORE}*/**/*.py")):
        relative = path.relative_to(source)
        part = relative.parts[0].removeprefix(CORE).removeprefix("_") or "core"
        if part == "core":
            inside = str(relative.relative_to(CORE))
            kept = inside.startswith("planner/") and path.stem in _PLAN_IN_CORE
            for name, patterns in PATTERNS.items():
                if name not in packages and not kept and any(fnmatch(inside, pattern) for pattern in patterns):
                    part = name
        modules[".".join(relative.with_suffix("").parts).removesuffix(".__init__")] = (path, part)
    return modules


def imports(path: Path, modules: dict[str, tuple[Path, str]]) -> Iterator[tuple[str, str]]:
    """Yield each module of the house that a file imports, with the imported name."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            whole = f"{node.module}.{alias.name}"
            target = whole if whole in modules else node.module or ""
            if target in modules:
                yield target, alias.name


def main(source: Path, every: bool) -> None:
    modules = parts_of_files(source)
    lines: Counter[str] = Counter()
    files = Counter(part for _, part in modules.values())
    pairs: defaultdict[tuple[str, str], defaultdict[tuple[Path, Path], set[str]]] = defaultdict(
        lambda: defaultdict(set)
    )
    for path, part in modules.values():
        lines[part] += len(path.read_text("utf-8").splitlines())
        for target, name in imports(path, modules):
            file, there = modules[target]
            if there != part:
                pairs[part, there][path, file].add(name)
    for part, count in lines.most_common():
        print(f"{part:8} {files[part]:4} files {count:7,} lines")
    for (here, there), found in sorted(pairs.items()):
        print(f"{here} -> {there}: {len(found)} pairs of files")
        for (path, file), names in sorted(found.items()) if every and here == "core" else ():
            print(f"    {path.relative_to(source)} -> {file.relative_to(source)}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    folders = [argument for argument in sys.argv[1:] if argument != "-v"]
    main(Path(folders[0] if folders else "src"), "-v" in sys.argv)
