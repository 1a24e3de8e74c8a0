"""Apply small faults to a copy of the package, one at a time, and see whether the tests notice: mutation testing.

The faults ("mutants") are data: `tests/mutants/*.yaml`. Each names a function, a piece of source in it, the source that
replaces it, and the tests that must fail then. A mutant that no test notices has survived: a guard is missing.

A piece is found by syntax in the files of a name, so neither its format, the code around it nor the folder matters. A
mutant lapses if its piece is no longer in its function, or is there more than once, or its tests have left: it is named
and not run. `--stale` lists these; who changes such a place mends them, and nobody else has to.

All mutants take hours: this runs every night (`.github/workflows/nightly.yml`) or on request.

    .venv/bin/python scripts/check_mutants.py [--stale] [--only ID ...] [--write-table]
"""

from __future__ import annotations

import argparse
import ast
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src")
TABLE = ROOT / "benchmarks/results/mutants.md"
_HEAD = """# Faults that the tests notice

`.venv/bin/python scripts/check_mutants.py --write-table`, last on {date}: each fault was put into a copy of the
package, and the tests that concern it were run. Seconds include the start of pytest.

**{caught} of {all} are caught.**

| fault | place | what breaks | | first test that fails | s |
|---|---|---|---|---|---:|
"""
Verdict = Literal["caught", "timed out", "survived", "broken"]
# By pytest's exit code, None where the time was over. With any other code the tests did not run.
_VERDICTS: Mapping[int | None, Verdict] = {0: "survived", 1: "caught", None: "timed out"}
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::\w+|\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        at: place of the fault, `module:Class.method`: the name of a file without its folders, and a function or class
            in it, or nothing for the whole module.
        find: expression or statements that occur exactly once there, in any format; else a text, such as a keyword
            argument or the head of a loop, in which white space does not matter.
        replace: source that takes their place; `pass` instead of statements that are left out.
        breaks: sentence that says what goes wrong then.
        tests: files or node ids of the tests that must notice.
        slow: True if tests that are marked `slow` are run too.
        hangs: True if the fault may make the tests wait for ever, so that a time-out counts as noticed.
    """

    id: str
    at: str
    find: str
    replace: str
    breaks: str
    tests: tuple[str, ...]
    slow: bool = False
    hangs: bool = False

    def applied(self, root: Path = ROOT) -> tuple[Path, str]:
        """Return the file that has the piece, and its source with the fault; ValueError if the mutant is stale."""
        fits = []
        for path in sorted((root / SOURCE).rglob(f"{self.at.partition(':')[0]}.py")):
            with suppress(ValueError):
                fits.append((path, self.apply(path.read_text("utf-8"))))
        if len(fits) != 1:
            raise ValueError(f"its piece must occur once in {self.at}, and {len(fits)} files have it once")
        compile(fits[0][1], str(fits[0][0]), "exec")
        return fits[0]

    def apply(self, source: str) -> str:
        """Return this source of the module with the fault in it; ValueError if the mutant is stale."""
        tree = ast.parse(source)
        scopes: list[ast.AST] = [tree]
        for name in filter(None, self.at.partition(":")[2].split(".")):
            scopes = [node for scope in scopes for node in _definitions(scope) if node.name == name]
        find, replace = _parse(self.find, self.replace)
        places = [place for scope in scopes for place in _places(scope, find)]
        spans = [] if find else [span for scope in scopes for span in _spans(source, scope, self.find)]
        if len(places) + len(spans) != 1:
            raise ValueError(f"its piece must occur once in {self.at}, and does {len(places) + len(spans)} times")
        for start, end in spans:
            return source[:start] + self.replace + source[end:]
        node, field, index = places[0]
        children = getattr(node, field)
        if isinstance(children, list):
            children[index : index + len(find)] = replace
        else:
            setattr(node, field, replace[0])
        return ast.unparse(tree)


def _parse(*texts: str) -> list[list[ast.AST]]:
    """Return the nodes of each text: an expression each, or else the statements; none if a text is no whole node."""
    try:
        bodies: list[list[ast.AST]] = [[*ast.parse(text).body] for text in texts]
    except SyntaxError:
        return [[] for _ in texts]
    values = [node.value for body in bodies for node in body if isinstance(node, ast.Expr)]
    is_expression = len(values) == len(texts) == sum(map(len, bodies))
    return [[value] for value in values] if is_expression else bodies


def _definitions(scope: ast.AST) -> Iterator[_Definition]:
    """Yield the functions and classes of a scope, without those inside them."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _Definition):
            yield node
        else:
            yield from _definitions(node)


def _places(scope: ast.AST, find: Sequence[ast.AST]) -> Iterator[tuple[ast.AST, str, int]]:
    """Yield each node of the scope that holds these nodes in a row, its field, and the index of the first one there."""
    kinds = [*map(type, find)]  # an expression and the statement that consists of it have the same text
    texts = [*map(ast.unparse, find)]
    for node in ast.walk(scope):
        for field, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            for index in range(len(children) - len(find) + 1) if find else ():
                row = children[index : index + len(find)]
                if [*map(type, row)] == kinds and [*map(ast.unparse, row)] == texts:
                    yield node, field, index


def _spans(source: str, scope: ast.AST, find: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of a text, with any white space between its words, in the lines of a scope."""
    lines = range(getattr(scope, "lineno", 1), getattr(scope, "end_lineno", sys.maxsize) + 1)
    for text in re.finditer(r"\s+".join(map(re.escape, find.split())), source):
        if 1 + source.count("\n", 0, text.start()) in lines:
            yield text.span()


@dataclass(frozen=True)
class Result:
    """Answer of the tests to a mutant.

    Attributes:
        seconds: duration of the tests.
        by: first test that failed.
        output: text that pytest printed.
    """

    mutant: Mutant
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


def stale_mutants(mutants: Iterable[Mutant]) -> dict[str, str]:
    """Return, by its id, the reason of each mutant that does not fit the source, leaves no Python or lost a test."""
    reasons = {}
    for mutant in mutants:
        try:
            mutant.applied()
        except (ValueError, SyntaxError) as error:
            reasons[mutant.id] = str(error)
        if missing := [test for test in mutant.tests if not _has_test(test)]:
            reasons[mutant.id] = f"no file has its tests: {', '.join(missing)}"
    return reasons


def _has_test(node_id: str) -> bool:
    """Return True if the file of a test exists and, where a function is named, defines it."""
    name, _, function = node_id.partition("[")[0].partition("::")
    path = ROOT / name
    if not function:
        return path.exists()
    definition = rf"^\s*def {re.escape(function.rpartition('::')[2])}\("
    return path.is_file() and re.search(definition, path.read_text("utf-8"), re.MULTILINE) is not None


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
    start = time.monotonic()
    path, faulty = mutant.applied(copy)
    sound = path.read_text("utf-8")
    compiled = Path(importlib.util.cache_from_source(str(path)))
    path.write_text(faulty, "utf-8")
    compiled.unlink(missing_ok=True)  # Python would not see a change within a second that keeps the length
    try:
        code, output = run_tests(copy, mutant.tests, mutant.slow, timeout)
    finally:
        path.write_text(sound, "utf-8")
        compiled.unlink(missing_ok=True)
    by = _FAILED.search(output)
    return Result(mutant, _VERDICTS.get(code, "broken"), time.monotonic() - start, by[1] if by else "", output)


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
    for result in results:
        mutant = result.mutant
        verdict = result.verdict if result.is_caught else f"**{result.verdict}**"
        by = f"`{result.by}`" if result.by else ""
        cells = f"`{mutant.id}`", f"`{mutant.at}`", mutant.breaks, verdict, by, f"{result.seconds:.0f}"
        rows[mutant.id] = f"| {' | '.join(cells)} |"
    kept = [rows[mutant.id] for mutant in mutants if mutant.id in rows]
    caught = sum("| **" not in row for row in kept)
    head = _HEAD.format(date=time.strftime("%Y-%m-%d"), caught=caught, all=len(kept))
    return head + "".join(f"{row}\n" for row in kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stale", action="store_true", help="only list the mutants that no longer fit the source")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="copies in which faults are tried at once (default: 1)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for the tests of a fault (default: 240)")
    parser.add_argument("--write-table", action="store_true", help=f"update {TABLE.relative_to(ROOT)}")
    options = parser.parse_args()
    everything = load_mutants()
    if unknown := set(options.only or ()) - {mutant.id for mutant in everything}:
        parser.error(f"no mutants of these names: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in everything if not options.only or mutant.id in options.only]
    stale = stale_mutants(chosen)
    for name, reason in stale.items():
        print(f"    stale {name}: {reason}", flush=True)
    if options.stale:
        return 1 if stale else 0
    chosen = [mutant for mutant in chosen if mutant.id not in stale]
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
    caught = len(results) - len(missed)
    print(f"{caught} of {len(results)} are caught{'; not: ' if missed else ''}{', '.join(missed)}; {len(stale)} stale")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
