"""State of a model and its optimizer: to the disk by weight_writers, host_buffer, save; back by restore, load_weights.

canonical_tensors     whole tensors, put together from the ranks' parts
weight_writers        the rank that writes each canonical weight, and its parts from other ranks
host_buffer           host memory between the training thread and the one that writes
save                  a checkpoint, written while training continues
format/, storage/     its files and their places, without torch
collective_reading    stored tensors into a layout's parts, each byte read by one rank
restore               a checkpoint into a model and its optimizer
load_weights          weights alone: of a checkpoint or of a Hugging Face folder

companions            files beside the weights, and token ids of the weights that a run starts from
importing/            models of other programs
"""
