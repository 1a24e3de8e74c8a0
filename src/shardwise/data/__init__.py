"""Data: text becomes tokens once, and tokens become the same batches at any layout. numpy and tokenizers only."""

from shardwise.data.preparation import PreparedData, prepare
from shardwise.data.sampler import IGNORE, Batch, Sampler, TokenBatches
from shardwise.data.tokenizer import Tokenizer, special_token_ids

__all__ = ["IGNORE", "Batch", "PreparedData", "Sampler", "TokenBatches", "Tokenizer", "prepare", "special_token_ids"]
