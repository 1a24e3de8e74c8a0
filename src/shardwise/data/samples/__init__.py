"""Tokens become the samples and the batches that a model reads, the same ones at any layout.

In the order in which data flow:

    order.py            the order of the data: samples shuffled in each epoch, sources of a blend, random draws
    causal.py           samples of causal models: rows of tokens, and documents in another order in each epoch
    sentence_pairs.py   samples of BERT: pairs of sentences with masked tokens
    text_stream.py      samples of text that is tokenized while it is trained on, and their order
    batch.py            a global batch cut over ranks and micro-batches; blends of several sources
"""
