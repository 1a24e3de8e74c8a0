"""Python's cyclic garbage is collected between steps, at the same steps on every rank.

By itself the collector runs whenever enough objects were made: at any place of a step, on each rank at another one, and
all ranks wait for the one that collects.
"""

from __future__ import annotations

import gc
from types import TracebackType

_STEPS_BEFORE_FREEZE = 2
"""Steps after which the objects that a training keeps are all there."""
_FULL_EVERY = 100
"""Steps between two searches of all objects, which take up to a tenth of a second where none are frozen."""


class SteppedCollection:
    """Inside, garbage is collected by `after_step` alone; afterwards the collector is as it was before.

    Objects that exist after the first steps are not looked at again, unless the program had objects frozen before.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._was_enabled = gc.isenabled()
        self._freezes = not gc.get_freeze_count()

    def __enter__(self) -> SteppedCollection:
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._freezes:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self) -> None:
        """Collect young garbage, which takes microseconds where there is none, and at times all garbage."""
        self._steps += 1
        if self._steps == _STEPS_BEFORE_FREEZE and self._freezes:
            gc.collect()
            gc.freeze()
        else:
            gc.collect(1 if self._steps % _FULL_EVERY else 2)
