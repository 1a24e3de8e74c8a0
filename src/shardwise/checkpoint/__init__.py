"""A model's state outside of the run: canonical tensors and Hugging Face folders."""

from shardwise.checkpoint.canonical import canonical
from shardwise.checkpoint.export import export_hugging_face

__all__ = ["canonical", "export_hugging_face"]
