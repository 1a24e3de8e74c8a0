"""Data: text becomes tokens once, and tokens become the same batches at any layout. no torch."""

from shardwise.data.batch import IGNORE, Batch, Batches
from shardwise.data.blend import BlendedBatches
from shardwise.data.build import make_batches, make_evaluation
from shardwise.data.documents import DocumentBatches
from shardwise.data.hdf5 import PreparedShards, ShardBatches, reads_shards
from shardwise.data.huggingface import fetch_dataset, reads_datasets
from shardwise.data.indexed import IndexedFile, IndexedWriter
from shardwise.data.megatron import PreparedDocuments, reads_indexed
from shardwise.data.pairs import SentencePairBatches
from shardwise.data.preparation import prepare
from shardwise.data.prepared import PreparedData, PreparedText
from shardwise.data.sampler import Sampler
from shardwise.data.sentences import Sentences
from shardwise.data.streaming import StreamBatches
from shardwise.data.tokenizer import PairTokens, Tokenizer, special_token_ids
from shardwise.data.tokens import TokenBatches

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
]
