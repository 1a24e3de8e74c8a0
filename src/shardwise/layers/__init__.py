"""Sharded layers and losses: each holds its shard as a plain parameter and communicates over the group it is given."""
