"""Check what a release publishes: `make release-check`.

1. The version is the same in the package, in CITATION.cff and in a dated section of CHANGELOG.md, and pyproject.toml
   has the addresses of the repository and its issues (not with `--draft`).
2. The sdist builds in an isolated environment, and the wheel from the sdist; `twine check --strict` accepts both.
3. The wheel holds every file of the package and nothing else.
4. Each of them installs into an empty environment of every supported Python that this machine has, where `pip check` is
   content, every public name can be imported, and a training on two ranks runs and resumes on one.

What was not tried, such as a Python that is not installed, is listed at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Every Python that is supported."""
NAMES = "import shardwise; [getattr(shardwise, name) for name in shardwise.__all__]"
TRAINING = ("train", "llama2-tiny", "train.steps=4", "optimizer.warmup_steps=1", "--run-dir", "run")


class ReleaseError(Exception):
    """Something that must be mended before the release."""


def version() -> str:
    """The version in the package's source."""
    text = (SOURCE / "shardwise/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise ReleaseError("src/shardwise/__init__.py must have a line __version__ = …")
    return found[1]


def text_problems(wanted: str, changelog: str, citation: str, project: str) -> list[str]:
    """What CHANGELOG.md, CITATION.cff and pyproject.toml must still say of a version."""
    problems = []
    if not re.search(rf"^## \[{re.escape(wanted)}\] - \d{{4}}-\d{{2}}-\d{{2}}$", changelog, re.MULTILINE):
        problems.append(f"CHANGELOG.md must have a section '## [{wanted}] - DATE': move what is under Unreleased there")
    unreleased = changelog.partition("## [Unreleased]\n")[2].partition("\n## [")[0].strip()
    if unreleased:
        problems.append("the section Unreleased of CHANGELOG.md must be empty")
    if f"\nversion: {wanted}\n" not in citation:
        problems.append(f"version in CITATION.cff must be {wanted}")
    if not tomllib.loads(project)["project"].get("urls", {}).keys() >= {"Repository", "Issues"}:
        problems.append("[project.urls] of pyproject.toml must have the addresses Repository and Issues")
    return problems


def wheel_problems(names: Sequence[str], package: Sequence[str]) -> list[str]:
    """Files that the wheel lacks, and files beside the package and its metadata."""
    held = {name for name in names if ".dist-info/" not in name}
    missing, more = sorted(set(package) - held), sorted(held - set(package))
    problems = [f"the wheel must hold {name}: see [tool.setuptools.package-data] in pyproject.toml" for name in missing]
    return problems + [f"the wheel must not hold {name}" for name in more]


def package_files() -> list[str]:
    """Every file of the package, as a wheel names it."""
    packages = [path.parent for path in SOURCE.glob("*/__init__.py")]
    found = [path for package in packages for path in package.rglob("*")]
    files = [path for path in found if path.is_file() and "__pycache__" not in path.parts]
    return sorted(path.relative_to(SOURCE).as_posix() for path in files)


def run(*command: str | Path, at: Path = ROOT) -> None:
    """Run a command; its output is shown where it fails."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], cwd=at, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")


def environment(python: str | Path, folder: Path) -> Path:
    """The interpreter of a new virtual environment."""
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    tools = environment(sys.executable, folder / "tools")
    pip(tools, "build", "twine")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
    run(tools, "-m", "build", "--outdir", folder / "dist", source)
    run(tools, "-m", "twine", "check", "--strict", *sorted((folder / "dist").iterdir()))
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def interpreters(named: Sequence[str]) -> dict[str, str]:
    """Supported Python → an interpreter of it that runs: those named, and those on the PATH."""
    found: dict[str, str] = {}
    for candidate in (*named, *(f"python{wanted}" for wanted in PYTHONS), sys.executable):
        asked = "import sys; print('%d.%d' % sys.version_info[:2])"
        if shutil.which(candidate):
            done = subprocess.run([candidate, "-c", asked], capture_output=True, text=True, check=False)
            if done.returncode == 0 and done.stdout.strip() in PYTHONS:
                found.setdefault(done.stdout.strip(), candidate)
    return found


def tour(python: str, package: Path, folder: Path) -> None:
    """Install a package into an empty environment, import every public name, train on two ranks and resume on one."""
    inside = environment(python, folder / "environment")
    pip(inside, package, "--constraint", ROOT / "constraints.txt")
    run(inside, "-m", "pip", "check")
    run(inside, "-c", NAMES, at=folder)
    shardwise = inside.with_name("shardwise")
    run(shardwise, *TRAINING, "--nproc", "2", "parallel.tensor=2", "train.stop_after=2", at=folder)
    run(shardwise, *TRAINING, "parallel.tensor=1", at=folder)
    run(shardwise, "checkpoint", "verify", "run", at=folder)


def checks(draft: bool, named: Sequence[str], folder: Path) -> Iterator[str]:
    """Each check that passed, in words.

    Raises:
        ReleaseError: one did not pass.
    """
    wanted = version()
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff", "pyproject.toml")]
    if not draft and (problems := text_problems(wanted, *texts)):
        raise ReleaseError("\n".join(problems))
    yield f"version {wanted}" + (": changelog and addresses were not looked at (--draft)" if draft else " in all files")
    sdist, wheel = build(folder)
    with zipfile.ZipFile(wheel) as archive:
        if problems := wheel_problems(archive.namelist(), package_files()):
            raise ReleaseError("\n".join(problems))
    yield f"{sdist.name} and {wheel.name}: built, complete, accepted by twine"
    found = interpreters(named)
    for number, (name, python) in enumerate(found.items()):
        for package in (wheel, sdist) if number == 0 else (wheel,):
            place = folder / f"{name}-{package.suffix}"
            place.mkdir()
            tour(python, package, place)
            shutil.rmtree(place)
            yield f"Python {name}: {package.name} installs, imports, trains and resumes"
    absent = [name for name in PYTHONS if name not in found]
    if absent:
        yield f"not tried, as they are not installed: Python {', '.join(absent)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="store_true", help="before the changelog has the section of the version")
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="another interpreter; repeatable")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for passed in checks(arguments.draft, arguments.python, Path(folder)):
                print(f"release-check: {passed}", flush=True)
        except ReleaseError as error:
            print(f"release-check: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
