"""Text becomes tokens.

In the order in which data flow:

    tokenizer_files.py   the files of a tokenizer, of any program, opened
    tokenizer.py         the tokenizer: trained on the data, or the user's
    windows.py           long documents cut into windows whose tokens are those of the document
    encoding.py          documents and sentences encoded into the files of a cache entry
"""
