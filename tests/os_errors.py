"""Calls of the operating system that fail."""

import os
from collections.abc import Callable


def raises(code: int) -> Callable[..., None]:
    """A function that fails as the operating system does, by this code of `errno`."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail
