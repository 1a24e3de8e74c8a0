"""Models of other programs as checkpoints of step 0: hugging_face, megatron and neuron.

pickled                   files of `torch.save`, opened so that no code in them can run
tensor_parallel_shards    tensors of tensor-parallel ranks, put together
megatron, neuron          Megatron-LM; neuronx-distributed and neuronx-nemo-megatron
hugging_face              a Hugging Face folder; and the model that each source gives, with its checkpoint

Whatever the source, it becomes canonical tensors that are put together a few rows at a time while they are written.
"""
