"""Do torch's kernel for documents of any length and FlexAttention have the same loss, and which one is faster?"""

from __future__ import annotations

from unittest import mock

import torch

from first_gpu.session import Figures, Session
from first_gpu.training import Setting, build, timed_steps
from shardwise.distributed import devices

TITLE = "Documents within samples"
NOTE = (
    "Steps of shardwise's trainer whose samples have documents of about 1,000 tokens, which attend by themselves. The "
    "loss is that of the last step. `varlen_attn` is FlexAttention too where the device has no such kernel."
)
COLUMNS = "program kernel micro_batch has_kernel step_ms loss peak_allocated"
_FREQUENT = 850
"""A token that is one in a thousand of the random text."""


def run(session: Session) -> None:
    for setting in session.few([Setting(False, "none", 1), Setting(True, "none", 1), Setting(True, "none", 2)]):
        for kernel in ("varlen_attn", "FlexAttention"):
            session.measure({**setting.labels, "kernel": kernel}, lambda s=setting, k=kernel: _steps(session, s, k))


def _steps(session: Session, setting: Setting, kernel: str) -> Figures:
    keys = ["data.reset_attention_mask=true", f"data.eod_token={_FREQUENT % session.sizes.vocabulary}"]
    config = setting.config(session, session.sizes.micro_batches[0], keys=keys)
    attends = devices.attends_by_document if kernel == "varlen_attn" else lambda *_: False
    # Both begin with the same weights.
    with mock.patch.object(devices, "attends_by_document", attends), devices.seeded(session.device, 0):
        trainer = build(session, config)
        trainer.step()
        found = timed_steps(session, trainer, rounds=4)
        trainer.feed.close()
    return {**found, "has_kernel": attends(session.device, torch.bfloat16, session.sizes.head_dim)}
