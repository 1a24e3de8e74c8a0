"""Optimizers over sharded state, gradient norms, and the learning rate.

`zero.py` wraps an optimizer class so that each data-parallel rank keeps and updates 1/n of its state (ZeRO-1).
Gradients and parameters lie in flat `buckets.py`, cut evenly over the ranks; their sizes and order come from
`bucket_layout.py`. A step sums the gradients bucket by bucket, clips them by the gradient norm of the whole model
(`gradient_norms.py`), and updates the fp32 master weights of the owned slices (`master_update.py`). With bfloat16
masters the update runs in float32 and is rounded at random so that its mean is kept (`stochastic_rounding.py`). An
elementwise class needs nothing more; a class that needs whole tensors says how it updates slices
(`slice_optimizer.py`), as `lamb.py` does. Parameters that no group cuts are kept equal on all tensor-parallel ranks
(`unsharded_parameters.py`). `state.py` gives a checkpoint the state by canonical tensor, and `checks.py` refuses wrong
parameters, arguments and states. `learning_rate.py` is the rate of each step. The record of each optimizer, with its
state tensors, is in `config/optimizers.py`.
"""
