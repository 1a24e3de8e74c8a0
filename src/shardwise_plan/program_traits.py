"""The ways in which the program that trains spends time differently from other programs."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise_plan.overlap import TensorOverlap


@dataclass(frozen=True)
class ProgramTraits:
    """The ways in which the program that trains differs from others; the defaults are this package's.

    Attributes:
        fused_attention: True if one kernel computes attention; otherwise its probabilities are written and read.
        loss_ahead: True if the head's gradients are computed in the forward pass.
        overlaps: True if gradients are reduced behind the backward pass, bucket by bucket.
        waits_for_messages: True if a rank waits for its messages to other stages.
        splits_messages: True if the ranks of a tensor-parallel group each send a part of a message, and gather it.
        runs_ahead: True if the host starts kernels before the device is done with earlier ones.
        casts_gradients: True if a weight's new gradient is copied to the gradients' dtype before it is added to them.
        flattens_gradients: True if a weight's new gradient is copied into a flat tensor, to the gradients' dtype, and
            divided there before it is reduced, and not added to a whole one.
        adds_products: True if the products of blocks add to gradients of float32 by themselves.
        updates_in_one_pass: True if each value of the optimizer's step is read and written once, also to scale the
            gradients and to round the weights, and the norm reads the gradients of all ranks.
        reduces_all: True if gradients are all-reduced even if the optimizer's state is sharded.
        recomputes_core: True if selective recompute repeats attention, fused or not, and nothing else.
        recomputes_ring: True if attention to keys that come rank by rank is computed again in the backward pass, on
            accelerators.
        separate_kernels: True if each element-wise function of a block is a kernel; otherwise functions one after the
            other are one.
        kernels: number of kernels that a block starts in its forward pass.
        tensor_overlap: how tensor parallelism communicates behind matrix products; None if in turn with them.
        rounding_bytes: bytes that are read and written to round an element of an operand of fp8 products, along both
            dimensions; None: those of this package's kernels.
        block_scales: True if each 32 numbers of an operand of fp8 products have a scale (MXFP8).
        fused_shares: parts of the peak that fused attention reaches forward and backward; None: those of the device's
            best.
        logits_bytes: bytes that the loss reads and writes for each logit, forward and backward, beside those of the
            head's products; None: those of a copy in float32.
        stops_recompute: True if full recompute ends with the last tensor that the backward pass needs, so that a
            block's last product is not computed again.
        unpads_attention: True if fused attention takes copies of the rows of q, k and v, and its output is copied back.
        update_values: values of an element that the optimizer's step reads and writes; None: those of this package's.
        gathered_metrics: numbers that each rank gathers from all ranks at the end of a step. The host fills a tensor
            for each rank's number and copies it there, while the device waits.
        travels_once: True if a token travels once to a rank that has several of its experts,
            False if to each of them.
        graphs: True if a CUDA graph starts the kernels, so that the device does not wait for the host.
    """

    fused_attention: bool = True
    loss_ahead: bool = True
    overlaps: bool = True
    waits_for_messages: bool = False
    splits_messages: bool = False
    runs_ahead: bool = True
    casts_gradients: bool = False
    flattens_gradients: bool = False
    adds_products: bool = False
    updates_in_one_pass: bool = False
    reduces_all: bool = False
    recomputes_core: bool = False
    recomputes_ring: bool = True
    separate_kernels: bool = False
    kernels: int = 24
    tensor_overlap: TensorOverlap | None = None
    rounding_bytes: int | None = None
    block_scales: bool = False
    fused_shares: tuple[float, float] | None = None
    logits_bytes: tuple[int, int] | None = None
    stops_recompute: bool = False
    unpads_attention: bool = False
    update_values: int | None = None
    gathered_metrics: int = 0
    travels_once: bool = True
    graphs: bool = False
