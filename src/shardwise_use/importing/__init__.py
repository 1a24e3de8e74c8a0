"""Models of other programs as checkpoints of step 0: hugging_face, megatron, nemo and neuronx.

pickled                   files of `torch.save`, opened so that no code in them can run
torch_dcp                 folders of torch.distributed.checkpoint, whose tensors are read box by box
tensor_parallel_shards    tensors of tensor-parallel ranks, put together
megatron, nemo, neuronx   one file for each format
hugging_face              a Hugging Face folder; and the model that each source gives, with its checkpoint

Whatever the source, it becomes canonical tensors that are put together a few rows at a time while they are written.
"""
