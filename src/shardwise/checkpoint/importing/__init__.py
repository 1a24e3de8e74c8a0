"""Weights of other programs as checkpoints of ours: Hugging Face folders, Megatron-LM, neuronx's libraries.

Whatever the source, it becomes canonical tensors that are put together a few rows at a time while they are written.
"""

from shardwise.checkpoint.importing.foreign_model import ForeignModel, write_checkpoint
from shardwise.checkpoint.importing.hugging_face import open_hugging_face
from shardwise.checkpoint.importing.megatron import open_megatron
from shardwise.checkpoint.importing.nemo import open_nemo
from shardwise.checkpoint.importing.neuronx import open_neuronx

__all__ = ["ForeignModel", "open_hugging_face", "open_megatron", "open_nemo", "open_neuronx", "write_checkpoint"]
