"""Weights of other programs as checkpoints of ours: Hugging Face folders, Megatron-LM, neuronx's libraries.

Whatever the source, it becomes canonical tensors that are put together a few rows at a time while they are written.
"""
