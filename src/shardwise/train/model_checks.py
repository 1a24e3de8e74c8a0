"""Checks of a model: copies of a parameter are equal bit for bit, all values are finite, axes are not swapped."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, RunError, see
from shardwise.config import PLAIN_MODULE, ModelConfig, ParallelConfig
from shardwise.data.samples.batch import IGNORE, Batches
from shardwise.distributed import collectives, devices, placement
from shardwise.distributed.mesh import Group, Mesh
from shardwise.models.blocks import gives_losses
from shardwise.optim.state import weight_slices
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.pipeline.stages import Stages, relay
from shardwise.train.mean_loss import MicroBatch

_WIDTH_TO_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FAR_BELOW_A_GUESS = 10
"""A first loss that is lower by this factor is no sum over targets: a model that was just drawn knows only to guess."""
_CHUNK = 1 << 22  # elements widened to 64 bits at a time: 64 MiB with their positions, 2 × 8 bytes for each of 2^22


@torch.no_grad()
def check_axes(model: nn.Module, batches: Batches, mesh: Mesh, settings: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse a model of the user's own that takes the sequence for the batch, or whose loss is a mean. Collective.

    Only the last target of the last sample counts. If its loss depends on the other samples, and not on the tokens
    before it in its own sample, the axes are swapped. If the loss of it and of the first sample's last target is half
    of what both have alone, it is a mean.

    Raises:
        ConfigError: the axes are swapped, or the loss is a mean.
    """
    batch, vocab_size = MicroBatch.on(mesh.device, batches.blank(2)), settings.vocab_size
    ids_SB = batch.inputs["ids_SB"]
    ignored_SB = torch.full_like(batch.inputs["targets_SB"], IGNORE)
    last_SB, first_SB, both_SB = (ignored_SB.clone() for _ in range(3))
    last_SB[-1, -1] = first_SB[-1, 0] = both_SB[-1, -1] = both_SB[-1, 0] = 0
    drawn = torch.randint(vocab_size, ids_SB.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    ids_SB = drawn.to(ids_SB)
    other_samples_SB = ids_SB.clone()
    other_samples_SB[:, :-1] = (ids_SB[:, :-1] + 1) % vocab_size
    earlier_tokens_SB = ids_SB.clone()
    earlier_tokens_SB[:-1, -1] = (ids_SB[:-1, -1] + 1) % vocab_size
    variants = [(ids, last_SB) for ids in (ids_SB, other_samples_SB, earlier_tokens_SB)]
    variants += [(ids_SB, first_SB), (ids_SB, both_SB)]
    losses: list[Tensor] = []

    def compute(part: nn.Module, x: Tensor | None, number: int) -> Tensor:
        ids, targets = variants[number]
        inputs = {**batch.inputs, "ids_SB": ids, "targets_SB": targets}
        changed = replace(batch, inputs=inputs, lengths_B=None)
        out = changed.result(part, changed.call_of(part, x)())
        losses.extend([out] if gives_losses(part) else [])
        return out

    in_training = [module for module in model.modules() if module.training]
    model.eval()
    length = len(ids_SB) // (mesh.tp.size if parallel.sequence else 1)
    relay(model, parallel, mesh, compute, [(length, ids_SB.shape[1])] * len(variants))
    for module in in_training:
        module.training = True
    is_swapped = bool(losses) and not losses[0].equal(losses[1]) and losses[0].equal(losses[2])
    last, _, _, first, both_losses = map(float, map(torch.sum, losses)) if losses else (0.0,) * 5
    is_mean = last + first > 0 and math.isclose(2 * both_losses, last + first, rel_tol=0.01)
    if any(collectives.all_gather_objects(is_swapped, mesh.pp)):
        raise ConfigError(
            f"model.family ({settings.family}): ids and targets must be read as [sequence, batch], but a loss "
            "depends on the other samples and not on the earlier tokens of its own: transpose both at the start of "
            f"forward, and return the sum of the losses; {PLAIN_MODULE}{see('training#swapped-axes')}"
        )
    if any(collectives.all_gather_objects(is_mean, mesh.pp)):
        raise ConfigError(
            f"model.family ({settings.family}): forward must return the sum of its targets' losses, not their "
            f"mean, and two targets give half of what both give alone{see('training#first-loss-too-low')}"
        )


def mean_text(model: ModelConfig, loss: str | None, first_loss: float) -> str | None:
    """The warning of a training that a user's own model or loss may return a mean; None for another first loss."""
    source = loss
    if model.is_own:
        source = f"forward of {model.family}, which gets ids and targets [sequence, batch],"
    # Equal probabilities of all V tokens give a loss of ln V.
    guess = math.log(model.vocab_size)
    if source is None or first_loss >= guess / _FAR_BELOW_A_GUESS:
        return None
    return (
        f"the first loss ({first_loss:.3g}) is far below that of a guess, ln(model.vocab_size) ({guess:.3g}): "
        f"{source} must return the sum of its targets' losses, not their mean{see('training#first-loss-too-low')}"
    )


@torch.no_grad()
def check_replicas(model: nn.Module, mesh: Mesh, step: int, optimizer: ZeroRedundancyOptimizer | None = None) -> None:
    """Check a training's model for drift: every parameter over data parallelism, and every copied piece. Collective.

    Of parameters that ZeRO-3 frees, copies of their parts are compared.

    Raises:
        RunError: names the first tensor that differs and the ranks whose value is not that of most of their group.
    """
    by_group: dict[Group, list[tuple[str, Tensor]]] = {}
    for piece, _, values, is_part in weight_slices(model, optimizer, mesh.tp):
        owners = piece.replicas or mesh.replicas
        if is_part and optimizer is not None:
            owners = optimizer.cut_over(owners).copies
        groups = [group for group in (owners, piece.copies) if group.size > 1]
        if groups:
            digest = _digest(values)
            for group in groups:
                by_group.setdefault(group, []).append((piece.name, digest))
    problems = []
    # One exchange for each group, whatever the number of its tensors.
    for group, entries in by_group.items():
        # As halves: not every device compares or sends 64-bit integers.
        halves = torch.stack([digest for _, digest in entries]).view(torch.int32).to(mesh.device)
        everyone = collectives.all_gather(halves.unsqueeze(0), group)
        differs = (everyone != everyone[0]).any(dim=-1).any(dim=0)
        for column in torch.nonzero(differs).flatten().tolist()[:1]:
            digests = everyone[:, column]
            # The digest that most ranks have, so that the rank at fault is named and not all the others.
            usual = int((digests[:, None] == digests).all(dim=-1).sum(dim=1).argmax())
            ranks = [
                rank for rank, digest in zip(group.ranks, digests, strict=True) if not digest.equal(digests[usual])
            ]
            problems.append(f"{entries[column][0]} on ranks {ranks} differs from rank {group.ranks[usual]}")
    if every_problem := collectives.union(problems, mesh.world):
        raise RunError(
            f"step {step}: replicated parameters have drifted apart: {every_problem[0]}"
            f"{see('training#drifted-parameters')}"
        )


def _digest(tensor: Tensor) -> Tensor:
    """Two sums over the bits, one of them weighted by position: both a changed and an exchanged element show."""
    bits = tensor.contiguous().view(_WIDTH_TO_INTEGER[tensor.element_size()]).flatten()
    bits = bits if devices.has_wide_integers(bits.device) else bits.cpu()
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        sums[0] += part.sum()
        sums[1] += part.mul_(torch.arange(start + 1, start + 1 + part.numel(), device=part.device)).sum()
    return sums


def find_non_finite(model: nn.Module, loss: float) -> tuple[tuple[int, int, int], str]:
    """Find a non-finite value of a model in training; return a key that sorts nearest causes first, and a text or "".

    The key has 0 for a weight, 1 for the loss and 2 for a gradient; then stage and parameter in the order of the pass
    that uses them.
    """
    parts = [(0, model)]
    if isinstance(model, Stages):
        parts = [(stage.index, part) for stage, part in model.pairs()]
    pieces = [
        (stage, order, parameter, piece.name, piece.local.slices)
        for stage, part in parts
        for order, (_, parameter, record) in enumerate(placement.placements(part))
        for piece in record.pieces
    ]
    for stage, order, parameter, name, slices in pieces:
        if not torch.isfinite(parameter[slices]).all():
            return (0, stage, order), f"{name} is the first parameter with a value that is not finite"
    text = "" if math.isfinite(loss) else f"its loss is {loss}"
    for stage, order, parameter, name, slices in reversed(pieces):
        gradients = [
            owner.grad for owner in (parameter, *placement.further_gradients(parameter)) if owner.grad is not None
        ]
        if not all(torch.isfinite(gradient[slices]).all() for gradient in gradients):
            first = f"{name} is the first parameter, in backward's order, with a gradient that is not finite"
            # The backward pass goes through stages and parameters from the last to the first.
            return (1 if text else 2, -stage, -order), f"{text} and {first}" if text else first
    return (1, 0, 0), text
