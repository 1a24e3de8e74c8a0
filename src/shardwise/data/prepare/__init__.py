"""Preparation: `shardwise data prepare` writes data that runs read as they are. Nothing here imports torch.

In the order in which data flow:

    from_text.py          the job: text → tokens → files of a format
    tokenizing.py         text → an unfinished Megatron data set, in parallel and resumable
    to_arrow.py           tokens → blocks of one length, a folder that `datasets` opens
    to_hdf5.py            tokens → masked sentence pairs, HDF5 shards
    from_raw_tokens.py    the other job: a flat file of ids → a Megatron data set
    work_folder.py        the folder in which data are made, and the disk that they need
    outputs.py            the place of the result, its manifest, and results that are there already
"""
