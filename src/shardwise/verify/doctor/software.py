"""Python, the packages that shardwise needs, and the optional ones, against the versions that it supports."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from shardwise import __version__
from shardwise.verify.doctor.check import Check, ok

_FOR_DEVELOPERS = "dev"


def software(
    requires: Callable[[str], list[str] | None] = metadata.requires, version: Callable[[str], str] = metadata.version
) -> Iterator[Check]:
    """Python and packages; `requires` and `version` tell of a distribution as `importlib.metadata` does."""
    try:
        requirements = [Requirement(text) for text in requires("shardwise") or []]
    except metadata.PackageNotFoundError:
        yield Check(
            "packages",
            "warning",
            f"shardwise {__version__} is imported from a folder, and which versions it needs is not known",
            "install it: pip install shardwise, or pip install -e . in its source",
        )
        return
    python = platform.python_version()
    wanted = SpecifierSet(metadata.metadata("shardwise")["Requires-Python"])
    if python in wanted:
        yield ok("python", f"{python}, of {wanted}")
    else:
        yield Check("python", "wrong", f"{python} must be {wanted}", "make an environment with a Python that is")
    needed = [one for one in requirements if _applies(one, "")]
    yield from _torch(needed, version)
    yield from _group("packages", [one for one in needed if one.name != "torch"], version)
    for extra in sorted({extra for one in requirements for extra in _extras(one)} - {_FOR_DEVELOPERS}):
        of_extra = [one for one in requirements if extra in _extras(one)]
        missing = [one.name for one in of_extra if _installed(one, version) is None]
        if missing:
            yield ok(f"[{extra}]", f"not installed, which is optional: pip install 'shardwise[{extra}]'")
        else:
            yield from _group(f"[{extra}]", of_extra, version, optional=True)


def _torch(needed: list[Requirement], version: Callable[[str], str]) -> Iterator[Check]:
    for one in needed:
        if one.name == "torch":
            problem = _problem(one, version)
            if problem is None:
                yield ok("torch", f"{version('torch')}, of {one.specifier}")
            else:
                mend = "install a torch for this machine's devices: https://pytorch.org/get-started/locally"
                yield Check("torch", "wrong", problem, mend)


def _group(
    name: str, requirements: Iterable[Requirement], version: Callable[[str], str], *, optional: bool = False
) -> Iterator[Check]:
    """One line of packages that are well, and one of each that is not."""
    well = []
    for one in requirements:
        problem = _problem(one, version)
        if problem is None:
            well.append(f"{one.name} {_installed(one, version)}")
        else:
            mend = f"pip install '{one.name}{one.specifier}'"
            yield Check(name, "warning" if optional else "wrong", problem, mend)
    if well:
        yield ok(name, ", ".join(well))


def _problem(one: Requirement, version: Callable[[str], str]) -> str | None:
    installed = _installed(one, version)
    if installed is None:
        return f"{one.name} is not installed, and must be {one.specifier or 'there'}"
    if not one.specifier.contains(installed, prereleases=True):
        return f"{one.name} ({installed}) must be {one.specifier}"
    return None


def _installed(one: Requirement, version: Callable[[str], str]) -> str | None:
    try:
        return version(one.name)
    except metadata.PackageNotFoundError:
        return None


def _applies(one: Requirement, extra: str) -> bool:
    return one.marker is None or one.marker.evaluate({"extra": extra})


def _extras(one: Requirement) -> set[str]:
    """The extras that bring a package."""
    known = metadata.metadata("shardwise").get_all("Provides-Extra") or []
    return {extra for extra in known if not _applies(one, "") and _applies(one, extra)}
