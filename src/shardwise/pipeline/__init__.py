"""Pipeline parallelism: schedules of torch over the stages of one rank, and a relay for the forward pass alone.

`Pipeline` is imported from `shardwise.pipeline.schedule` by those that use it: torch's schedules import torch's
compiler, which takes as long as importing torch itself.
"""

from shardwise.pipeline.clock import Clock, StageSeconds, StepTiming
from shardwise.pipeline.relay import Compute, relay

__all__ = ["Clock", "Compute", "StageSeconds", "StepTiming", "relay"]
