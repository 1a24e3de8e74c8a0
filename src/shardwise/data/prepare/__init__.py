"""Preparation: `shardwise data prepare` writes data that runs read as they are. Nothing here imports torch."""
