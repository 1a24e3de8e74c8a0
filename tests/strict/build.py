"""Builds the strict device with the machine's C++ compiler, once for each torch and version of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).parent
NAME = "strict_library"
SOURCES = ("device", "collectives")


def missing() -> str:
    """What a build lacks on this machine; empty: nothing."""
    if shutil.which("g++") is None:
        return "no C++ compiler (g++)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"no {header} (Debian: python3-dev)"


def library() -> Path:
    """The shared library, in STRICT_BUILD or the repository's ignored folder `build`; made where it does not exist."""
    root = Path(os.environ.get("STRICT_BUILD", HERE.parents[1] / "build"))
    folder = root / f"strict-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"
    parts = [folder / f"{name}-{_digest(f'{name}.cpp', 'strict.h')}.o" for name in SOURCES]
    made = folder / f"{NAME}-{'-'.join(part.stem.split('-')[-1] for part in parts)}.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test workers may come here at once
        if not made.exists():
            _build(parts, made)
    return made


def variables() -> dict[str, str]:
    """What makes every Python load the device as it imports torch: the entry point below `entry`."""
    folders = [str(HERE.parents[1]), str(HERE / "entry"), os.environ.get("PYTHONPATH", "")]
    return {"TEST_DEVICE": "strict", "STRICT_DEVICES": "4", "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def use_everywhere() -> None:
    """Build it, and let every Python that this process starts load it; not this process itself."""
    library()
    os.environ.update(variables())


def _digest(*names: str) -> str:
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in names)).hexdigest()[:8]


def _build(parts: list[Path], made: Path) -> None:
    from torch.utils import cpp_extension  # slow to import, and needed only here

    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    options = ["-O1", "-w", "-fPIC", "-std=c++20", f"-DTORCH_EXTENSION_NAME={NAME}", *(f"-I{f}" for f in folders)]
    running = [
        subprocess.Popen(["g++", *options, "-c", str(HERE / f"{name}.cpp"), "-o", str(part)])
        for name, part in zip(SOURCES, parts, strict=True)
        if not part.exists()
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError("the strict device does not compile: see the messages of g++ above")
    linked = made.with_suffix(".part")
    names = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    libraries = f"-L{Path(torch.__file__).parent / 'lib'}"
    subprocess.run(["g++", "-shared", *map(str, parts), libraries, *names, "-o", str(linked)], check=True)
    linked.rename(made)
