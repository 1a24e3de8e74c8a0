"""A run's folder: its files, its events, and the devices of this machine. Nothing here imports torch.

`shardwise_watch` has the readers that follow a run.
"""
