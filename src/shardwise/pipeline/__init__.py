"""Pipeline parallelism: schedules of torch over the stages of one rank, and a relay for the forward pass alone.

`Pipeline` is imported from `shardwise.pipeline.schedule`, where it is used: torch's schedules import torch's compiler,
which takes as long as importing torch itself.
"""

from shardwise.pipeline.clock import Clock, Span
from shardwise.pipeline.relay import Compute, relay
from shardwise.pipeline.timing import StageSeconds, StepTiming

__all__ = ["Clock", "Compute", "Span", "StageSeconds", "StepTiming", "relay"]
