"""A module for each format of data, with the functions of its record in `open_data.FORMATS`: open, preview and inspect.

Shared by all of them:

    prepared_data.py  prepared data, and checks that several formats share
    inspections.py    the result of an inspection

Formats:

    megatron.py       Megatron's .bin and .idx, one or several in a blend
    hdf5.py           HDF5 shards of masked sentence pairs
    datasets.py       data sets of the library `datasets`
    chat.py           conversations, whose answers are trained on
    text.py           text that is tokenized once; random text for measurements
    tokens.py         token ids as other programs wrote them
    streamed_text.py  text that is tokenized while it is trained on
    user_samples.py   samples of the object that `hooks.data` names
"""
