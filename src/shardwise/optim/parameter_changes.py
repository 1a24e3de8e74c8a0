"""Changes of parameters between steps (load_state_dict, clamp_), which their masters must adopt.

An in-place change raises the version of a parameter. A change through `.data` does not, and neither does one by a
kernel that torch does not know: only a comparison of the values shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.optim.buckets import Bucket


def adopt_changes(buckets: Sequence[Bucket], *, compares_values: bool) -> None:
    """Let masters adopt changes of parameters since the last step.

    Args:
        buckets: buckets of one device.
        compares_values: True to look for changes through `.data` too. This reads and writes 12 bytes for each bfloat16
            parameter, and the host waits once for the device.
    """
    for bucket in buckets:
        bucket.adopt_changes()
    compared = [bucket for bucket in buckets if compares_values and bucket.has_comparable_values]
    if compared:
        differs = torch.stack([bucket.differs_from_masters() for bucket in compared]).tolist()
        for bucket, has_changed in zip(compared, differs, strict=True):
            if has_changed:
                bucket.adopt_values()
