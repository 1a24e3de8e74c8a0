"""The files that data lie in: their kinds, and the text or the tokens in them.

Text, in the order in which it is read:

    content.py           bytes of a file, unpacked, and its kind, told by them: text, JSON lines or parquet
    jsonl_parquet.py     documents of a file
    dataset_tables.py    tables of the library `datasets`: text or tokens
    text_sources.py      all documents of files, data sets or built-in text, in pieces; or of a file, from any place on

Tokens:

    raw_tokens.py        flat files of ids, alone or behind a header that is known
    token_rows.py        rows of ids in arrow columns and JSON lines
    token_files.py       the files of ids that a path names, of either kind
    megatron_files.py    Megatron's .bin and .idx, read and written
    hdf5_files.py        HDF5 shards of masked sentence pairs
    data_manifest.py     the record that `shardwise data prepare` leaves beside its files
"""
