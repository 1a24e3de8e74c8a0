"""Optimizers over sharded state, gradient norms, and the learning rate.

`zero.py` wraps an optimizer class: each data-parallel rank keeps and updates 1/n of its state, in flat `buckets.py`. A
class that needs whole tensors says how it updates slices (`wrapped_class.py`). `state.py` gives a checkpoint the
state by canonical tensor. The record of each optimizer, with its state tensors, is in `config/optimizer_specs.py`.
"""
