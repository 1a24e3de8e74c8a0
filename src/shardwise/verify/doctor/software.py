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
    """Check Python and packages.

    Args:
        requires: returns the requirements of a distribution, as `importlib.metadata.requires` does.
        version: returns its version, as `importlib.metadata.version` does.
    """
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
    supported = SpecifierSet(metadata.metadata("shardwise")["Requires-Python"])
    if python in supported:
        yield ok("python", f"{python}, of {supported}")
    else:
        yield Check("python", "wrong", f"{python} must be {supported}", "make an environment with a Python that is")
    always_needed = [requirement for requirement in requirements if _applies(requirement, "")]
    yield from _torch(always_needed, version)
    yield from _group("packages", [needed for needed in always_needed if needed.name != "torch"], version)
    extras = set[str]().union(*map(_extras, requirements))
    for extra in sorted(extras - {_FOR_DEVELOPERS}):
        packages = [requirement for requirement in requirements if extra in _extras(requirement)]
        if any(_installed(package, version) is None for package in packages):
            yield ok(f"[{extra}]", f"not installed, which is optional: pip install 'shardwise[{extra}]'")
        else:
            yield from _group(f"[{extra}]", packages, version, optional=True)


def _torch(needed: list[Requirement], version: Callable[[str], str]) -> Iterator[Check]:
    for requirement in needed:
        if requirement.name == "torch":
            problem = _problem(requirement, version)
            if problem is None:
                yield ok("torch", f"{version('torch')}, of {requirement.specifier}")
            else:
                mend = "install a torch for this machine's devices: https://pytorch.org/get-started/locally"
                yield Check("torch", "wrong", problem, mend)


def _group(
    name: str, requirements: Iterable[Requirement], version: Callable[[str], str], *, optional: bool = False
) -> Iterator[Check]:
    """Yield a check of all packages that are well, and a check for each that is not."""
    well = []
    for requirement in requirements:
        problem = _problem(requirement, version)
        if problem is None:
            well.append(f"{requirement.name} {_installed(requirement, version)}")
        else:
            mend = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Check(name, "warning" if optional else "wrong", problem, mend)
    if well:
        yield ok(name, ", ".join(well))


def _problem(requirement: Requirement, version: Callable[[str], str]) -> str | None:
    installed = _installed(requirement, version)
    if installed is None:
        return f"{requirement.name} is not installed, and must be {requirement.specifier or 'there'}"
    if not requirement.specifier.contains(installed, prereleases=True):
        return f"{requirement.name} ({installed}) must be {requirement.specifier}"
    return None


def _installed(requirement: Requirement, version: Callable[[str], str]) -> str | None:
    try:
        return version(requirement.name)
    except metadata.PackageNotFoundError:
        return None


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _extras(requirement: Requirement) -> set[str]:
    """Return the extras that bring a package."""
    all_extras = metadata.metadata("shardwise").get_all("Provides-Extra") or []
    return {extra for extra in all_extras if not _applies(requirement, "") and _applies(requirement, extra)}
