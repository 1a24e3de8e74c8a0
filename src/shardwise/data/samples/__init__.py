"""Tokens become the samples and the batches that a model reads, the same ones at any layout."""
