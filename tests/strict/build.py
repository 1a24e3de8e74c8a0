"""Builds devices for tests with the machine's C++ compiler, once for each torch and version of the sources."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
NAME = "strict_library"
SOURCES = tuple(HERE / name for name in ("strict.h", "device.cpp", "collectives.cpp"))


def missing() -> str:
    """What a build lacks on this machine; empty: nothing."""
    if shutil.which("g++") is None:
        return "no C++ compiler (g++)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"no {header} (Debian: python3-dev)"


def library(name: str = NAME, sources: Sequence[Path] = SOURCES) -> Path:
    """The shared library, in STRICT_BUILD or the repository's ignored folder `build`; made where it does not exist."""
    root = Path(os.environ.get("STRICT_BUILD", HERE.parents[1] / "build"))
    folder = root / f"strict-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]
    made = folder / f"{name}-{digest}.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test workers may come here at once
        if not made.exists():
            _build(made, name, sources)
    return made


def loaded(name: str = NAME, sources: Sequence[Path] = SOURCES) -> Any:
    """The library as a module of this process."""
    found = importlib.util.spec_from_file_location(name, library(name, sources))
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def variables() -> dict[str, str]:
    """What makes every Python load the device as it imports torch: the entry point below `entry`."""
    folders = [str(HERE.parents[1]), str(HERE / "entry"), os.environ.get("PYTHONPATH", "")]
    return {"TEST_DEVICE": "strict", "STRICT_DEVICES": "4", "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def use_everywhere() -> None:
    """Build it, and let every Python that this process starts load it; not this process itself."""
    library()
    os.environ.update(variables())


def _build(made: Path, name: str, sources: Sequence[Path]) -> None:
    from torch.utils import cpp_extension  # slow to import, and needed only here

    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    options = ["-O1", "-w", "-fPIC", "-std=c++20", f"-DTORCH_EXTENSION_NAME={name}", *(f"-I{f}" for f in folders)]
    names = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    libraries = f"-L{Path(torch.__file__).parent / 'lib'}"
    linked = made.with_suffix(".part")
    # As one translation unit: nearly all of the time goes to torch's headers, which each unit would read again.
    units = "".join(f'#include "{source}"\n' for source in sources)
    command = ["g++", "-shared", *options, "-x", "c++", "-", libraries, *names, "-o", str(linked)]
    if subprocess.run(command, input=units, text=True, check=False).returncode:
        raise RuntimeError(f"{name} does not compile: see the messages of g++ above")
    linked.rename(made)
