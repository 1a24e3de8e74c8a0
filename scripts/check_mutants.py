"""Apply small faults to a copy of the package, one at a time, and see whether the tests notice: mutation testing.

The faults ("mutants") are data: `tests/mutants/*.yaml`. Each names a text that occurs once in the package, the text
that replaces it, and the tests that must fail then. A mutant that no test notices has survived: a guard is missing.

    .venv/bin/python scripts/check_mutants.py [--only ID ...] [--write-table]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/shardwise")
TABLE = ROOT / "benchmarks/results/mutants.md"
_HEAD = """# Faults that the tests notice

`.venv/bin/python scripts/check_mutants.py --write-table`: each fault was put into a copy of the package, and the tests
that concern it were run. Seconds include the start of pytest.

**{caught} of {all} are caught.**

| fault | file | what breaks | | first test that fails | s |
|---|---|---|---|---|---:|
"""
Verdict = Literal["caught", "timed out", "survived", "broken"]
# By pytest's exit code, None where the time was over. With any other code the tests did not run.
_VERDICTS: Mapping[int | None, Verdict] = {0: "survived", 1: "caught", None: "timed out"}
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::\w+|\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        find: a text that occurs exactly once in the package, whichever file it is moved to. replace: what takes its
        place. breaks: what goes wrong then, in a sentence.
        tests: files or node ids of the tests that must notice. slow: tests that are marked `slow` are run too.
        hangs: the fault may make the tests wait for ever, so that a time-out counts as noticed.
    """

    id: str
    find: str
    replace: str
    breaks: str
    tests: tuple[str, ...]
    slow: bool = False
    hangs: bool = False

    def file(self, sources: Mapping[Path, str]) -> Path:
        """Which of these files, given with their texts, has the fault's place; ValueError where the mutant is stale."""
        counts = {path: text.count(self.find) for path, text in sources.items() if self.find in text}
        if (total := sum(counts.values())) != 1:
            where = "".join(f", {path}" for path in sorted(counts))
            raise ValueError(
                f"mutant {self.id}: its text must occur once in the package, and does {total} times{where}"
            )
        return next(iter(counts))


@dataclass(frozen=True)
class Result:
    """What the tests said of a mutant in a file of the package. by: the first that failed. output: pytest's."""

    mutant: Mutant
    file: Path
    verdict: Verdict
    seconds: float = 0.0
    by: str = ""
    output: str = ""

    @property
    def is_caught(self) -> bool:
        return self.verdict == "caught" or (self.verdict == "timed out" and self.mutant.hangs)


def load_mutants() -> list[Mutant]:
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "tests/mutants").glob("*.yaml"))]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for text in texts for entry in yaml.safe_load(text)]


def sources(root: Path = ROOT) -> dict[Path, str]:
    """The text of every file of the package, by its path below the package."""
    package = root / PACKAGE
    return {path.relative_to(package): path.read_text("utf-8") for path in sorted(package.rglob("*.py"))}


def copy_tracked_files(target: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(copy: Path, tests: Iterable[str], slow: bool, timeout: float | None) -> tuple[int | None, str]:
    """pytest's exit code in a copy, None where it took longer than `timeout` seconds, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests]
    command += ["-m", "slow or not slow"] if slow else []
    code: int | None = None
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile("w+") as output:
        # A cache of its own: what a fault has prepared must not reach the tests that follow.
        own = {"PYTHONPATH": str(copy / "src"), "SHARDWISE_CACHE": f"{scratch}/cache", "TMPDIR": scratch}
        process = subprocess.Popen(
            command, cwd=copy, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout)
        with suppress(ProcessLookupError):  # its ranks too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return code, output.read()


def check(copy: Path, mutant: Mutant, timeout: float) -> Result:
    """Run a mutant's tests in a copy that has the fault, which is taken out again."""
    file, start = mutant.file(texts := sources(copy)), time.monotonic()
    sound, path = texts[file], copy / PACKAGE / file
    compiled = Path(importlib.util.cache_from_source(str(path)))
    path.write_text(sound.replace(mutant.find, mutant.replace), "utf-8")
    compiled.unlink(missing_ok=True)  # Python would not see a change within a second that keeps the length
    try:
        code, output = run_tests(copy, mutant.tests, mutant.slow, timeout)
    finally:
        path.write_text(sound, "utf-8")
        compiled.unlink(missing_ok=True)
    by = _FAILED.search(output)
    return Result(mutant, file, _VERDICTS.get(code, "broken"), time.monotonic() - start, by[1] if by else "", output)


def require_sound_tests(copy: Path, mutants: Sequence[Mutant]) -> None:
    """End the program where a test fails without any fault: it would prove nothing."""
    for slow in {mutant.slow for mutant in mutants}:
        tests = sorted({test for mutant in mutants if mutant.slow == slow for test in mutant.tests})
        code, output = run_tests(copy, tests, slow, None)
        if code != 0:
            sys.exit(f"{output}\nthese tests must pass without a fault (pytest's exit code: {code})")


def table(results: Sequence[Result], mutants: Sequence[Mutant], before: str) -> str:
    """The results as a page; of mutants that were not run now, the rows of the page as it was before."""
    rows = {line.split("|")[1].strip(" `"): line for line in before.splitlines() if line.startswith("| `")}
    for each in results:
        one, by = each.mutant, f"`{each.by}`" if each.by else ""
        verdict = each.verdict if each.is_caught else f"**{each.verdict}**"
        rows[one.id] = f"| `{one.id}` | `{each.file}` | {one.breaks} | {verdict} | {by} | {each.seconds:.0f} |"
    kept = [rows[mutant.id] for mutant in mutants if mutant.id in rows]
    caught = sum("| **" not in row for row in kept)
    return _HEAD.format(caught=caught, all=len(kept)) + "".join(f"{row}\n" for row in kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="copies in which faults are tried at once (default: 1)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for the tests of a fault (default: 240)")
    parser.add_argument("--write-table", action="store_true", help=f"update {TABLE.relative_to(ROOT)}")
    options = parser.parse_args()
    everything = load_mutants()
    if unknown := set(options.only or ()) - {mutant.id for mutant in everything}:
        parser.error(f"no mutants of these names: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in everything if not options.only or mutant.id in options.only]
    chosen.sort(key=lambda mutant: mutant.tests)  # what runs one after the other is in the disk's cache
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="shardwise-mutants-") as folder:
        for number in range(options.jobs):
            copy_tracked_files(copy := Path(folder, str(number)))
            copies.put(copy)
        require_sound_tests(copy, chosen)

        def checked(mutant: Mutant) -> Result:
            copy = copies.get()
            result = check(copy, mutant, options.timeout)
            copies.put(copy)
            print(f"{result.verdict:>9} {mutant.id} ({result.seconds:.0f} s) {result.by}", flush=True)
            if not result.is_caught:
                print(f"          {mutant.breaks}\n{result.output[-2000:]}", flush=True)
            return result

        with ThreadPoolExecutor(options.jobs) as jobs:
            results = list(jobs.map(checked, chosen))
    if options.write_table:
        TABLE.write_text(table(results, everything, TABLE.read_text("utf-8") if TABLE.exists() else ""), "utf-8")
    missed = [result.mutant.id for result in results if not result.is_caught]
    print(f"{len(results) - len(missed)} of {len(results)} are caught{'; not: ' if missed else ''}{', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
