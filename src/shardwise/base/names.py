"""Names that come from outside: keys of an object store, files that an index or a manifest lists, tensors of a file.

Such a name may lead out of the folder that it belongs to. `name_problem` checks each before it is joined to a folder.
"""

from __future__ import annotations

import re

SAFETENSORS_METADATA = "__metadata__"
"""The member of a safetensors header that describes no tensor."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def name_problem(name: object, *, nested: bool = False) -> str | None:
    """The reason why `name` must not be joined to a folder; None where the result is sure to lie in that folder.

    Args:
        name: name that comes from outside.
        nested: True also allows a result in a folder of that folder, as `a/b` has.
    """
    if not isinstance(name, str):
        return f"{name!r} is no text"
    segments = name.split("/")
    if name.startswith("/"):
        return f"{name!r} is absolute"
    if ".." in segments:
        return f"{name!r} leads out of its folder"
    if "" in segments or "." in segments:
        return f"{name!r} has a part without a name"
    if _CONTROL.search(name) or "\\" in name:
        return f"{name!r} has a backslash or a control character"
    return f"{name!r} lies in another folder" if len(segments) > 1 and not nested else None


def is_tensor_name(name: str) -> bool:
    """True if a file can hold a tensor of this name, which will be shown: a terminal obeys some characters."""
    return name.isprintable() and name != SAFETENSORS_METADATA
