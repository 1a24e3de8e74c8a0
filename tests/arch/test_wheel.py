"""The built wheel in a user's own environment: it runs from anywhere and leaves the installed torch alone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.uv_settings import pip_settings, uv_variables
from tests.arch.source import ROOT, SOURCE

COMMANDS = (["plan", "llama2-tiny", "--device", "h100:1"], ["ls"], ["jobs", "--help"], ["chat", "--help"])
"""One of each package beside the core."""
OURS = ("shardwise", "__editable__", "_virtualenv", "distutils-precedence")
INPUTS = ("Makefile", "pyproject.toml", "constraints.txt", "scripts/env.sh")
RECORDER = """#!/usr/bin/env bash
[ "$1" != cache ] || exit 1
{ printf '%s' "NAME"; printf ' %s' "$@"; printf '\\n'; env | grep '^UV_\\|^SSL_CERT' ; } >>"$RECORD"
case "$*" in *--version) ;; *) exit "${NAME_FAILS:-0}" ;; esac
"""


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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what `make env` reads, with an environment that is complete and newer than all of it."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv").mkdir()
    for name in INPUTS:
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / ".venv" / ".complete").touch()
    return tmp_path


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=checkout, capture_output=True, text=True, timeout=60)


def test_an_environment_is_renewed_where_an_input_has_changed_alone(checkout: Path) -> None:
    assert make(checkout, "--question", "env").returncode == 0
    os.utime(checkout / ".venv" / ".complete", (2, 2))
    for name in (name for name in INPUTS if name != "Makefile"):
        (checkout / name).touch()
        assert make(checkout, "--question", "env").returncode == 1, name
        os.utime(checkout / name, (1, 1))
    (checkout / ".venv" / ".complete").unlink()
    result = make(checkout, "env", "PYTHON=false")
    assert result.returncode != 0
    assert "no Python >= 3.11 found (looked for: false)" in result.stderr


def test_pins_name_versions_only() -> None:
    """No addresses, no local builds: a pin means the same on every machine."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(line.count("==") == 1 and not set(line) & set("@:/+ ") for line in pins)


@dataclass
class Installers:
    """An environment whose pip, and a PATH whose uv, write down how they are called."""

    checkout: Path
    tools: Path
    record: Path

    def make(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kinds = ("PIP_", "UV_", "PYTHON", "SSL_")
        mine = {name: text for name, text in os.environ.items() if not name.startswith(kinds)}
        mine |= {"PATH": f"{self.tools}:{os.environ['PATH']}", "RECORD": str(self.record), "TMPDIR": str(self.tools)}
        self.record.write_text("", encoding="utf-8")
        command = ["make", *arguments]
        return subprocess.run(
            command, cwd=self.checkout, env=mine | variables, capture_output=True, text=True, timeout=60
        )

    @property
    def calls(self) -> list[str]:
        return [
            line for line in self.record.read_text(encoding="utf-8").splitlines() if line.startswith(("uv pip", "pip"))
        ]

    @property
    def variables(self) -> dict[str, str]:
        """Those of uv at its last call."""
        lines = self.record.read_text(encoding="utf-8").splitlines()
        return dict(line.split("=", 1) for line in lines if line.startswith(("UV_", "SSL_")))

    def stamps(self) -> set[str]:
        return {name for name in (".runtime", ".complete") if (self.checkout / ".venv" / name).exists()}


@pytest.fixture
def installers(checkout: Path, tmp_path: Path) -> Installers:
    shutil.copy(ROOT / "scripts" / "uv_settings.py", checkout / "scripts")
    environment = checkout / ".venv"
    venv.create(environment, with_pip=False, clear=True)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("uv", "pip"):
        (tools / name).write_text(RECORDER.replace("NAME", name), encoding="utf-8")
        (tools / name).chmod(0o755)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "pip").mkdir()
    stub = f"import subprocess, sys\nsys.exit(subprocess.run([{str(tools / 'pip')!r}, *sys.argv[1:]]).returncode)\n"
    (packages / "pip" / "__main__.py").write_text(stub, encoding="utf-8")
    return Installers(checkout, tools, tmp_path / "record")


def test_training_installs_the_package_and_tests_the_tools_too(installers: Installers) -> None:
    result = installers.make("runtime")
    assert result.returncode == 0, result.stderr
    assert "installing shardwise and what it needs" in result.stdout
    assert [call.endswith("--editable .") for call in installers.calls if "--editable" in call] == [True]
    assert installers.stamps() == {".runtime"}
    assert installers.make("--question", "runtime").returncode == 0

    installers.make("env")
    assert installers.calls[-1].endswith("--editable .[dev]")
    assert installers.stamps() == {".runtime", ".complete"}
    assert installers.make("env", "runtime").returncode == 0
    assert not installers.calls


def test_pip_installs_where_uv_fails_or_is_not_wanted(installers: Installers) -> None:
    result = installers.make("runtime", uv_FAILS="1")
    assert result.returncode == 0, result.stderr
    assert "uv cannot install here (see above); pip is tried" in result.stdout
    assert installers.calls[-1].endswith("--no-build-isolation --editable .")
    assert installers.calls[-1].startswith("pip ")

    installers.make("env", INSTALLER="pip")
    assert all(call.startswith("pip") for call in installers.calls)


def test_a_failed_installation_says_what_to_do(installers: Installers) -> None:
    result = installers.make("runtime", uv_FAILS="1", pip_FAILS="1")
    assert result.returncode != 0
    assert "make train: the packages could not be installed (see above). Check the network" in result.stderr
    assert not installers.stamps()


def test_a_torch_outside_the_environment_is_not_installed_again(installers: Installers, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "torch-2.12.0.dist-info").mkdir(parents=True)
    (outside / "torch-2.12.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.12.0\n", encoding="utf-8")
    installers.make("runtime", PYTHONPATH=str(outside))
    assert "UV_OVERRIDE" in installers.variables
    installers.make("runtime", "TORCH=2.13.0", PYTHONPATH=str(outside))
    assert "UV_OVERRIDE" not in installers.variables
    result = installers.make("env", PYTHONPATH=str(outside), TORCH="2.10.0")
    assert "torch (2.10.0) must be at least 2.11" in result.stderr


def test_uv_takes_what_pip_would(installers: Installers) -> None:
    installers.make("runtime", PIP_INDEX_URL="https://mirror/simple", PIP_CONSTRAINT="own.txt", PIP_CERT="/ca.pem")
    assert installers.variables["UV_DEFAULT_INDEX"] == "https://mirror/simple"
    assert installers.variables["UV_CONSTRAINT"].endswith("/constraints.txt own.txt")
    assert installers.variables["SSL_CERT_FILE"] == "/ca.pem"
    result = installers.make("env", PIP_NO_INDEX="1")
    assert "pip's setting no-index has no counterpart in uv" in result.stderr
    assert all(call.startswith("pip") for call in installers.calls)


def test_settings_of_pip_in_the_variables_of_uv() -> None:
    listed = (
        "global.index-url='https://a'\nglobal.find-links='/x /y'\ninstall.index-url='https://b'\nlist.format='json'\n"
    )
    settings = pip_settings(
        listed, {"PIP_FIND_LINKS": "/z", "PIP_NO_CACHE_DIR": "1", "PIP_QUIET": "1", "HOME": "/root"}
    )
    assert settings == {"index-url": "https://b", "find-links": "/z", "no-cache-dir": "1", "quiet": "1"}
    assert uv_variables(pip_settings(listed, {}), {"UV_DEFAULT_INDEX": "https://c"}) == {
        "UV_FIND_LINKS": "/x,/y",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert uv_variables({"cache-dir": "/cache", "no-cache-dir": "1"}, {}).items() >= {("UV_CACHE_DIR", "/cache/uv")}
    assert uv_variables({"no-index": "false"}, {}) == uv_variables({}, {})
    with pytest.raises(KeyError, match="only-binary"):
        uv_variables({"only-binary": ":all:"}, {})


def test_an_environment_whose_interpreter_has_gone_is_made_again(installers: Installers) -> None:
    for name in (".runtime", ".complete"):
        (installers.checkout / ".venv" / name).touch()
    assert installers.make("--question", "runtime", "env").returncode == 0
    for path in (installers.checkout / ".venv" / "bin").glob("python*"):
        path.unlink()
        path.symlink_to("/nowhere/python3")
    assert installers.make("--question", "runtime").returncode == 1
    result = installers.make("runtime", PYTHON="false")
    assert "the interpreter of .venv does not start; .venv is made again" in result.stdout
    assert not (installers.checkout / ".venv").exists()
