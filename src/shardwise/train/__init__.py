"""Training: from a configuration to a finished run directory (`run.run`); called, it is `shardwise.api.runs.train`."""

from shardwise.base.registered import make_callable

make_callable(__name__, "shardwise.api.runs")
