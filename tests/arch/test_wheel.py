"""The built wheel in a user's own environment: it runs from anywhere and leaves the installed torch alone."""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from tests.arch.source import ROOT, SOURCE

COMMANDS = (["plan", "llama2-tiny", "--device", "h100:1"], ["ls"], ["jobs", "--help"], ["chat", "--help"])
"""One of each package beside the core."""
OURS = ("shardwise", "__editable__", "_virtualenv", "distutils-precedence")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that neither an old build/ gets in nor a new one is left behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", build, target], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def user_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds torch and the other dependencies, by links, but not shardwise."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder, with_pip=False, symlinks=True)
    installed = folder / "installed"
    installed.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(OURS):
            (installed / entry.name).symlink_to(entry)
    (site_packages(folder) / "installed.pth").write_text(f"{installed}\n")
    return folder


def test_files_beside_the_code_are_package_data() -> None:
    """What the wheel of the slow test would lack."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = project["tool"]["setuptools"]["package-data"]
    found = {path for name, patterns in shipped.items() for each in patterns for path in (SOURCE / name).glob(each)}
    files = {path for name in shipped for path in (SOURCE / name).rglob("*") if path.is_file()}
    beside = {path for path in files if path.suffix not in (".py", ".pyc")}
    assert beside
    assert beside <= found, sorted(beside - found)


def site_packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))


@pytest.mark.slow
def test_wheel_works_in_a_users_environment(wheel: Path, user_environment: Path, tmp_path: Path) -> None:
    before = {path.name for path in site_packages(user_environment).iterdir()}
    python = str(user_environment / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-compile", str(wheel)]
    result = subprocess.run(install, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    added = {path.name for path in site_packages(user_environment).iterdir()} - before
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert {name.partition("-")[0] for name in added} == packages

    for arguments in (["train", "llama2-tiny", "--dry-run"], *COMMANDS, ["explain", "killed-rank"]):
        command = [user_environment / "bin" / "shardwise", *arguments]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    assert "dmesg" in result.stdout
    assert not list(tmp_path.iterdir())

    shipped = site_packages(user_environment)
    files = [path for name in packages for path in (SOURCE / name).rglob("*")]
    data = [path for path in files if path.is_file() and path.suffix != ".pyc"]
    missing = [path for path in data if not (shipped / path.relative_to(SOURCE)).is_file()]
    assert not missing, f"the wheel lacks {missing}: see [tool.setuptools.package-data]"
