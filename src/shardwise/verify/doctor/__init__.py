"""The examinations of `shardwise doctor`: this machine, its software, and the needs of a run."""
