"""Text becomes tokens: tokenizers, sentences, the held-out part, and the files of tokens that are written."""
