"""Models of other programs as checkpoints, with the progress of their training where that is known.

pickled                   files of `torch.save`, opened so that no code in them can run
torch_dcp                 folders of torch.distributed.checkpoint, whose tensors are read box by box
tensor_parallel_shards    tensors of tensor-parallel ranks, put together
megatron, nemo, …         one file for each format, with a function `open_…`
hugging_face              a Hugging Face folder
imported_model            the model that each source gives, and its checkpoint

The functions `open_…` take `allow_drift` to take the first of several replicas that differ, `weights_only` to leave out
the step and the optimizer's state, and `ignore` for fields of config.json that change nothing, as the user says. They
raise a ConfigError with everything that is wrong: the source is none of the format, incomplete, contradicts itself or
is not safe to open, or no family here has its model.

Whatever the source, it becomes canonical tensors that are put together a few rows at a time while they are written.
"""
