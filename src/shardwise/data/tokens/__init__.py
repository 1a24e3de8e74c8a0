"""Text becomes tokens.

In the order in which data flow:

    ranked_vocabularies.py  vocabularies of tekken and tiktoken
    tokenizer_files.py   the files of a tokenizer, of any program, opened
    tokenizer.py         the tokenizer: trained on the data, or the user's
    encoding.py          documents and sentences encoded into the files of a cache entry
"""
