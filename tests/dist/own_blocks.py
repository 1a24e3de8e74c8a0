"""Models of a user's own that name their blocks."""

import shardwise as sw
from examples.own_model import plain, sharded

MODULES = ("embedding", "blocks", "norm", "head")

Plain = sw.pipelined(plain.Decoder, *MODULES)
Sharded = sw.pipelined(sharded.Decoder, *MODULES, batch_first=False)
Swapped = sw.pipelined(plain.Decoder, *MODULES, batch_first=False)
