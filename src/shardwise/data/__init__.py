"""Data: text becomes tokens once, and tokens become the same batches at any layout. no torch."""

from shardwise.data.build import make_batches, make_evaluation
from shardwise.data.formats.common import PreparedData, PreparedText
from shardwise.data.formats.hdf5 import PreparedShards, ShardBatches, reads_shards
from shardwise.data.formats.megatron import PreparedDocuments, reads_indexed
from shardwise.data.formats.text import prepare
from shardwise.data.reading.datasets import fetch_dataset, reads_datasets
from shardwise.data.reading.megatron import IndexedFile, IndexedWriter
from shardwise.data.samples.batch import IGNORE, Batch, Batches
from shardwise.data.samples.blend import BlendedBatches
from shardwise.data.samples.documents import DocumentBatches
from shardwise.data.samples.pairs import SentencePairBatches
from shardwise.data.samples.rows import TokenBatches
from shardwise.data.samples.sampler import Sampler
from shardwise.data.samples.sentences import Sentences
from shardwise.data.samples.streaming import StreamBatches
from shardwise.data.tokens.tokenizer import PairTokens, Tokenizer, special_token_ids, train_tokenizer

__all__ = [
    "IGNORE",
    "Batch",
    "Batches",
    "BlendedBatches",
    "DocumentBatches",
    "IndexedFile",
    "IndexedWriter",
    "PairTokens",
    "PreparedData",
    "PreparedDocuments",
    "PreparedShards",
    "PreparedText",
    "Sampler",
    "SentencePairBatches",
    "Sentences",
    "ShardBatches",
    "StreamBatches",
    "TokenBatches",
    "Tokenizer",
    "fetch_dataset",
    "make_batches",
    "make_evaluation",
    "prepare",
    "reads_datasets",
    "reads_indexed",
    "reads_shards",
    "special_token_ids",
    "train_tokenizer",
]
