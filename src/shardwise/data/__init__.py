"""Data: text becomes tokens once, and tokens become the same batches at any layout. Nothing here imports torch."""

from shardwise.data.formats.common import PreparedData, PreparedText, make_batches, make_evaluation
from shardwise.data.opening import prepare
from shardwise.data.reading.datasets import fetch_dataset
from shardwise.data.reading.detect import detect
from shardwise.data.reading.megatron import IndexedFile, IndexedWriter
from shardwise.data.samples.batch import IGNORE, Batch, Batches
from shardwise.data.samples.causal import TokenBatches
from shardwise.data.samples.streaming import StreamBatches
from shardwise.data.tokens.tokenizer import Tokenizer, special_token_ids, train_tokenizer

__all__ = [
    "IGNORE",
    "Batch",
    "Batches",
    "IndexedFile",
    "IndexedWriter",
    "PreparedData",
    "PreparedText",
    "StreamBatches",
    "TokenBatches",
    "Tokenizer",
    "detect",
    "fetch_dataset",
    "make_batches",
    "make_evaluation",
    "prepare",
    "special_token_ids",
    "train_tokenizer",
]
