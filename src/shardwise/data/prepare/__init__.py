"""Preparation: `shardwise data prepare` writes data that runs read as they are. Nothing here imports torch.

from_text.py          text → tokens → a Megatron data set
from_raw_tokens.py    a flat file of ids → a Megatron data set
tokenizing.py         text → an unfinished Megatron data set, in parallel and resumable
work_folder.py        the folder in which data are made
outputs.py            the place of the result, its manifest, and results that are there already
disk_room.py          the disk that data will take
"""
