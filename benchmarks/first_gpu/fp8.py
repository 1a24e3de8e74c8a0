"""How much faster is a step whose products are in fp8?"""

from __future__ import annotations

from first_gpu.session import Session
from first_gpu.training import COLUMNS, Setting, steps_of

TITLE = "Products in fp8"
NOTE = "The same steps as those of the trainings, compiled, with `precision.matmul=fp8` and without."

__all__ = ["COLUMNS", "NOTE", "TITLE", "run"]


def run(session: Session) -> None:
    for micro_batch in session.few((2, 1), 1):
        for in_fp8 in (True, False):
            setting = Setting(True, "none", micro_batch, in_fp8)
            session.measure(
                setting.labels, lambda setting=setting: steps_of(session, setting, session.sizes.micro_batches[:1])
            )
