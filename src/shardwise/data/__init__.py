"""Data: text becomes tokens once, and tokens become the same batches at any layout. numpy and tokenizers only."""

from shardwise.data.batch import IGNORE, Batch, Batches
from shardwise.data.build import make_batches, make_evaluation
from shardwise.data.pairs import SentencePairBatches
from shardwise.data.preparation import PreparedData, prepare
from shardwise.data.sampler import Sampler
from shardwise.data.sentences import Sentences
from shardwise.data.tokenizer import PairTokens, Tokenizer, special_token_ids
from shardwise.data.tokens import TokenBatches

__all__ = [
    "IGNORE",
    "Batch",
    "Batches",
    "PairTokens",
    "PreparedData",
    "Sampler",
    "SentencePairBatches",
    "Sentences",
    "TokenBatches",
    "Tokenizer",
    "make_batches",
    "make_evaluation",
    "prepare",
    "special_token_ids",
]
