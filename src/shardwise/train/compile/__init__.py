"""Compiled training: what `torch.compile` compiles of a model, the cache of the graphs, and `shardwise compile`."""
