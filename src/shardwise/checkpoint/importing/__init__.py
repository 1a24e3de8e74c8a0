"""Models of other programs as checkpoints of step 0: hugging_face, megatron, nemo, neuronx → foreign_model → the disk.

pickled                   files of `torch.save`, opened so that no code in them can run
tensor_parallel_shards    tensors of tensor-parallel ranks, put together
hugging_face, megatron, nemo, neuronx    one file for each format
foreign_model             the model that each of them gives, and its checkpoint

Whatever the source, it becomes canonical tensors that are put together a few rows at a time while they are written.
"""
