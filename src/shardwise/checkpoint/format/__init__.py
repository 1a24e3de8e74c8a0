"""The files of a checkpoint, without torch: written by safetensors, writing, manifest; read by stored_tensors, verify.

safetensors             header of a file with tensors, and casts between dtypes
writing                 files planned as a whole, then written as their bytes arrive
manifest                contents of a checkpoint, and the checksums of its files
stored_tensors          any box of a stored tensor, and comparison with a model's tensors
verify                  every byte of a checkpoint
diff                    differences of two checkpoints
export_checkpoint       a checkpoint as a Hugging Face folder
weight_files            the weights of a Hugging Face folder or hub id, and hints for folders of other programs
model_files             config.json, tokenizer, generation settings and ids of special tokens
"""
