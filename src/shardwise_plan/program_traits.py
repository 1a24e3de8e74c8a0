"""The ways in which the program that trains spends time differently from other programs."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise_plan.overlap import TensorOverlap


@dataclass(frozen=True)
class ProgramTraits:
    """The ways in which the program that trains differs from others; the defaults are this package's."""

    # True if one kernel computes attention; otherwise its probabilities are written and read.
    fused_attention: bool = True
    loss_ahead: bool = True  # True if the head's gradients are computed in the forward pass
    overlaps: bool = True  # True if gradients are reduced behind the backward pass, bucket by bucket
    waits_for_messages: bool = False  # True if a rank waits for its messages to other stages
    # True if the ranks of a tensor-parallel group each send a part of a message, and gather it.
    splits_messages: bool = False
    runs_ahead: bool = True  # True if the host starts kernels before the device is done with earlier ones
    # True if a weight's new gradient is copied to the gradients' dtype before it is added to them.
    casts_gradients: bool = False
    # True if a weight's new gradient is copied into a flat tensor, to the gradients' dtype, and divided there before it
    # is reduced, and not added to a whole one.
    flattens_gradients: bool = False
    adds_products: bool = False  # True if the products of blocks add to gradients of float32 by themselves
    # True if each value of the optimizer's step is read and written once, also to scale the gradients and to round the
    # weights, and the norm reads the gradients of all ranks.
    updates_in_one_pass: bool = False
    reduces_all: bool = False  # True if gradients are all-reduced even if the optimizer's state is sharded
    recomputes_core: bool = False  # True if selective recompute repeats attention, fused or not, and nothing else
    # True if attention to keys that come rank by rank is computed again in the backward pass, on accelerators.
    recomputes_ring: bool = True
    # True if each element-wise function of a block is a kernel; otherwise functions one after the other are one.
    separate_kernels: bool = False
    kernels: int = 24  # number of kernels that a block starts in its forward pass
    # How tensor parallelism communicates behind matrix products; None if in turn with them.
    tensor_overlap: TensorOverlap | None = None
    # Bytes that are read and written to round an element of an operand of fp8 products, along both dimensions; None:
    # those of this package's kernels.
    rounding_bytes: int | None = None
    block_scales: bool = False  # True if each 32 numbers of an operand of fp8 products have a scale (MXFP8)
    # Parts of the peak that fused attention reaches forward and backward; None: those of the device's best.
    fused_shares: tuple[float, float] | None = None
    # Bytes that the loss reads and writes for each logit, forward and backward, beside those of the head's products;
    # None: those of a copy in float32.
    logits_bytes: tuple[int, int] | None = None
    # True if full recompute ends with the last tensor that the backward pass needs, so that a block's last product is
    # not computed again.
    stops_recompute: bool = False
    # True if fused attention takes copies of the rows of q, k and v, and its output is copied back.
    unpads_attention: bool = False
    # Values of an element that the optimizer's step reads and writes; None: those of this package's.
    update_values: int | None = None
    # Numbers that each rank gathers from all ranks at the end of a step. The host fills a tensor for each rank's number
    # and copies it there, while the device waits.
    gathered_metrics: int = 0
    # True if a token travels once to a rank that has several of its experts, False if to each of them.
    travels_once: bool = True
    graphs: bool = False  # True if a CUDA graph starts the kernels, so that the device does not wait for the host
