"""Data: text becomes tokens once, and tokens become the same batches at any layout. Nothing here imports torch.

reading    the files: which format they have, and what they hold
tokens     text to tokens: tokenizers, sentences, the held-out part
samples    tokens to samples and batches
formats    what commands do with data of each format
opening    the way of every command to them
"""

from shardwise.data.formats.common import PreparedData, PreparedText, make_batches, make_evaluation
from shardwise.data.formats.hdf5 import PreparedShards
from shardwise.data.formats.megatron import PreparedDocuments
from shardwise.data.opening import prepare
from shardwise.data.reading.datasets import fetch_dataset
from shardwise.data.reading.detect import detect
from shardwise.data.reading.megatron import IndexedFile, IndexedWriter
from shardwise.data.samples.batch import IGNORE, Batch, Batches
from shardwise.data.samples.blend import BlendedBatches
from shardwise.data.samples.causal import TokenBatches
from shardwise.data.samples.documents import DocumentBatches
from shardwise.data.samples.pairs import SentencePairBatches
from shardwise.data.samples.sampler import Sampler
from shardwise.data.samples.sentences import Sentences
from shardwise.data.samples.shards import ShardBatches
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
    "detect",
    "fetch_dataset",
    "make_batches",
    "make_evaluation",
    "prepare",
    "special_token_ids",
    "train_tokenizer",
]
