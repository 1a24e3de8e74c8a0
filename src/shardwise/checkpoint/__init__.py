"""The state of a model and its optimizer: saved, restored, exported, and imported from other programs."""

from shardwise.checkpoint.agreement import differ_in_tokens
from shardwise.checkpoint.canonical import canonical_tensors
from shardwise.checkpoint.export import export_hugging_face
from shardwise.checkpoint.load import load_checkpoint, load_hugging_face

__all__ = ["canonical_tensors", "differ_in_tokens", "export_hugging_face", "load_checkpoint", "load_hugging_face"]
