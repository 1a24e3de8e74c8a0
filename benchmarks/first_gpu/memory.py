"""How near is the planner's peak of memory to the measured one?"""

from __future__ import annotations

from collections.abc import Iterator

from first_gpu.session import Figures, Session
from first_gpu.training import Setting, build
from shardwise.config import check_layout
from shardwise.distributed import devices
from shardwise.estimates.memory import expected_memory

TITLE = "Memory, expected and measured"
NOTE = (
    "Peak of allocated bytes in two training steps, beside the estimate of `shardwise.estimates`, which is for eager "
    "programs."
)
COLUMNS = "program recompute blocks micro_batch peak_allocated expected_memory ratio peak_reserved"
_CASES = [
    *((Setting(False, recompute, 1), 2) for recompute in ("none", "selective", "full")),
    *((Setting(False, "none", micro_batch), 2) for micro_batch in (2, 4)),
    (Setting(False, "none", 1), 4),
    (Setting(True, "none", 1), 2),
    (Setting(False, "full", 4), 4),
]


def run(session: Session) -> None:
    for setting, blocks in session.few(_CASES):
        labels = {**setting.labels, "blocks": blocks}
        session.measure(labels, lambda setting=setting, blocks=blocks: _compare(session, setting, blocks))


def _compare(session: Session, setting: Setting, blocks: int) -> Iterator[Figures]:
    config = setting.config(session, 2, blocks)
    expected = expected_memory(config, check_layout(config, 1), accelerator=session.device.type != "cpu")
    assert expected is not None, "the model is shardwise's own"
    trainer = build(session, config)
    for _ in range(2):
        trainer.step()
    trainer.feed.close()
    found: Figures = {"expected_memory": expected.total, "expected_parts": dict(expected.rows())}
    if session.device.type != "cpu":
        found["ratio"] = devices.peak_memory(session.device) / expected.total
    yield found
