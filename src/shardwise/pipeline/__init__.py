"""Pipeline parallelism: schedules of torch over the stages of one rank, and a relay for the forward pass alone."""

from shardwise.pipeline.clock import Clock, Span
from shardwise.pipeline.relay import relay
from shardwise.pipeline.schedule import Compute, Pipeline

__all__ = ["Clock", "Compute", "Pipeline", "Span", "relay"]
