"""Preparation: `shardwise data prepare` writes data that runs read as they are. Nothing here imports torch.

from_text.py          text → tokens → a Megatron data set
from_raw_tokens.py    a flat file of ids → a Megatron data set
tokenizing.py         text → an unfinished Megatron data set, in parallel and resumable
output.py             the place of the result: the folder in which it is made, its manifest, data that are there already
"""
