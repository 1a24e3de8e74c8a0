"""A recipe's model and training in miniature: small and short, with all that decides how it is cut and computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.config import Config, Matmul, ModelConfig, check_layout, config_from_sections
from shardwise.config.base_section import divisors
from shardwise.config.key_rules import FP8_MULTIPLE
from shardwise.config.optimizer import OptimizerConfig
from shardwise.config.pipeline_schedule_specs import SCHEDULES
from shardwise.verify.layouts import Cell, common_batch

_HEAD_WIDTH = 8
_FEWEST_HEADS = 4
_PARALLEL_KEYS = ("vocab_multiple", "tensor_overlap", "sequence_regather", "replicate", "context_keys")
_LENGTH = 16
_WINDOW = 5
_VOCABULARY = 128
_BUCKET_MIB = 0.1  # MiB of gradients in a bucket: even so small a model then has several
SAMPLES_WITH_BITS = 2
"""Samples of a micro-batch in bit-equal training: products and sums over several samples are compared, too."""
_END = 3  # the token that ends a document in random text


def miniature(
    config: Config, cells: Sequence[Cell], steps: int, *, has_accelerator: bool, bitwise: bool = False
) -> Config:
    """Return the recipe in miniature, for `steps` steps at each of the `cells`.

    It keeps: the family and its keys; the ratio of query to key/value heads; by which of the tensor-parallel degrees
    heads, feed-forward width and vocabulary can be divided; ties, dropout, precision, optimizer, the form of the
    schedule, copies of what ZeRO cuts, a loss of the user's own, and what document ends change. It is small in width,
    depth, vocabulary and sequence, and warmup and decay take a step each. The learning rate is the optimizer record's.
    The masks of dropout are those of `invariant`, as those of `fast` depend on the layout. A model of the user's own
    keeps its keys, as their meaning is not known. With `bitwise` its training is bit-equal, with the smallest
    grains that suit the cells.
    """
    degrees = sorted({cell.tensor for cell in cells} | {1})
    model = config.model
    optimizer = config.optimizer
    data = config.data
    matmul = config.precision.matmul
    length = _sequence_length(model, matmul, cells, degrees)
    document_keys = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    documents = {key: True for key in document_keys if getattr(data, key)}
    values: dict[str, Any] = {
        "model": _model(model, matmul, degrees, max(4, *(cell.stages for cell in cells))),
        "parallel": {key: getattr(config.parallel, key) for key in _PARALLEL_KEYS},
        "train": {
            "steps": steps,
            "global_batch": common_batch(cells),
            "sequence_length": length,
            "seed": config.train.seed,
            "dropout_mode": "invariant" if model.is_own or model.has_dropout else "fast",
        },
        "optimizer": optimizer.model_dump()
        | _rates(optimizer)
        | {
            "warmup_steps": min(1, optimizer.warmup_steps),
            "constant_steps": 0,
            "decay_steps": optimizer.decay_steps and 1,
            "bucket_mib": _BUCKET_MIB,
        },
        "precision": config.precision.model_dump()
        | {"mode": config.precision.mode or ("mixed" if has_accelerator else "float32")},
        "data": {
            **documents,
            **({"eod_token": _END} if documents else {}),
            "masked_fraction": data.masked_fraction,
            "max_predictions": None if data.max_predictions is None else min(data.max_predictions, length),
        },
        "hooks": {"loss": config.hooks.loss},
    }
    if bitwise:
        grain = _grain(cell.tensor for cell in cells)
        # The scales of fp8 are those of all tokens of a rank, and no part's.
        cuts = 1 if matmul else _grain(cell.context for cell in cells)
        values["parallel"] |= {"tensor_overlap": None, "grain": grain, "context_grain": cuts}
        length = math.lcm(length, cuts * max(grain, 2)) if cuts > 1 else length
        values["train"] |= {"sequence_length": length, "bitwise": True, "data_grain": _grain(c.data for c in cells)}
        values["train"]["global_batch"] *= SAMPLES_WITH_BITS
    return config_from_sections(values)


def _rates(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the optimizer's learning rates, all in the ratio that `lr` has to that of the optimizer's record."""
    factor = optimizer.spec.miniature_lr / optimizer.lr
    muon = optimizer.muon
    return {
        "lr": optimizer.spec.miniature_lr,
        "min_lr": optimizer.min_lr * factor,
        "muon": muon.model_dump() | {"adamw_lr": muon.adamw_lr and muon.adamw_lr * factor},
    }


def _sequence_length(model: ModelConfig, matmul: Matmul | None, cells: Sequence[Cell], degrees: Sequence[int]) -> int:
    contexts = [cell for cell in cells if cell.context > 1]
    length = math.lcm(_LENGTH, *degrees, *(2 * cell.context * cell.tensor for cell in contexts))
    longest = model.max_position_embeddings
    if matmul is not None:
        lengths = [FP8_MULTIPLE * cell.context for cell in contexts]
        length = math.lcm(length, *(tokens for tokens in lengths if longest is None or tokens <= longest))
    # A model of the user's own keeps its sizes, so the sequence must not be longer than it can read.
    return min(length, longest) if model.is_own and longest is not None else length


def _grain(degrees: Iterable[int]) -> int:
    """Return the largest power of two among the degrees; layouts of other degrees are left out."""
    return max((degree for degree in degrees if degree & (degree - 1) == 0), default=1)


def _model(model: ModelConfig, matmul: Matmul | None, degrees: Sequence[int], layers: int) -> dict[str, Any]:
    given = model.model_dump()
    if model.is_own:
        return given
    heads = model.num_attention_heads
    kv_heads = model.num_key_value_heads
    head_divisor = _head_divisor(heads, kv_heads, degrees)
    rotary = getattr(model, "rotary_pct", 1.0)
    # Of fp8 products each rank's part is a multiple of this, whatever the degree.
    multiple = 1 if matmul is None else FP8_MULTIPLE
    # Rotary embeddings turn pairs of elements: their number in a head is even.
    widths = itertools.count(max(_HEAD_WIDTH, multiple), max(2, multiple))
    width = next(w for w in widths if int(w * rotary) and int(w * rotary) % 2 == 0)
    hidden = heads // head_divisor * width
    # Heads that are not as wide as the model has room for are twice as wide in miniature.
    head_dim = width if model.head_dim * heads == model.hidden_size else 2 * width
    feed_width = max(1, hidden * model.intermediate_size // model.hidden_size // multiple)
    sizes: dict[str, Any] = {
        "vocab_size": _alike(model.vocab_size, _VOCABULARY, degrees),
        "hidden_size": hidden,
        "intermediate_size": multiple * _alike(model.intermediate_size, feed_width, degrees),
        "num_hidden_layers": layers,
        "num_attention_heads": heads // head_divisor,
        "num_key_value_heads": kv_heads // head_divisor,
        "head_dim": head_dim,
        "pad_token_id": 0,
    }
    sizes |= model.in_miniature(sizes["intermediate_size"], partial(_alike, degrees=degrees))
    if "no_rope_layers" in given:
        sizes["no_rope_layers"] = tuple(itertools.islice(itertools.cycle(given["no_rope_layers"]), layers))
    if "layer_types" in given:
        # One kind after the other, as most patterns are longer than the model.
        sizes["layer_types"] = tuple(itertools.islice(itertools.cycle(dict.fromkeys(given["layer_types"])), layers))
    if given.get("sliding_window"):
        sizes["sliding_window"] = _WINDOW
    # Some kinds have a factor for each frequency, of which there are fewer in narrow heads.
    if given.get("rope_scaling"):
        sizes["rope_scaling"] = {
            key: value[: int(head_dim * rotary) // 2] if isinstance(value, list) else value
            for key, value in given["rope_scaling"].items()
        }
    return given | {key: value for key, value in sizes.items() if key in given}


def _head_divisor(heads: int, kv_heads: int, degrees: Sequence[int]) -> int:
    """Return the largest divisor of both numbers of heads that changes no divisibility by the degrees."""
    usable = []
    for n in divisors(math.gcd(heads, kv_heads)):
        is_alike = _are_alike(heads, heads // n, degrees)
        kv_is_alike = all(_fits(kv_heads, degree) == _fits(kv_heads // n, degree) for degree in degrees)
        if is_alike and kv_is_alike and (n == 1 or heads // n >= _FEWEST_HEADS):
            usable.append(n)
    return max(usable)


def _fits(kv_heads: int, degree: int) -> bool:
    """Return whether key/value heads can be cut over, or copied to, so many ranks."""
    return kv_heads % degree == 0 or degree % kv_heads == 0


def _are_alike(size: int, new_size: int, degrees: Iterable[int]) -> bool:
    return all((size % degree == 0) == (new_size % degree == 0) for degree in degrees)


def _alike(size: int, start: int, degrees: Sequence[int]) -> int:
    """Return the first number from `start` on that the same degrees divide."""
    return next(number for number in itertools.count(start) if _are_alike(size, number, degrees))


def miniature_at_cell(config: Config, cell: Cell) -> Config:
    """Return the miniature at a cell's layout.

    A pipeline has micro-batches of one sample, and other layouts two micro-batches on each rank. One process takes all
    samples at once, but in bfloat16 one by one, so that it rounds the sums of each as a pipeline does, and with fp8
    products, whose scales are those of a micro-batch. In
    bit-equal training all layouts have micro-batches of two samples, since their products must be the same. Collectives
    overlap as the recipe has it, or as the layout and the device can. ZeRO makes as many copies as in the recipe, where
    the data-parallel degree allows it.
    """
    parallel: dict[str, Any] = {**cell.parallel}
    if cell.data * cell.context % config.parallel.replicate:
        parallel["replicate"] = 1
    if cell.schedule is not None:
        parallel["schedule"] = cell.schedule
    if cell.schedule is not None and SCHEDULES[cell.schedule].splits_backward:
        # Overlap and a backward pass in two parts exclude each other.
        parallel["tensor_overlap"] = None
        parallel["sequence_regather"] = None
    elif config.parallel.tensor_overlap == "symmetric_memory" and (cell.device == "cpu" or not cell.sequence):
        parallel["tensor_overlap"] = "pieces"
    micro_batch = SAMPLES_WITH_BITS if config.is_bit_equal else 1
    is_plain = config.precision.mode == "float32" and config.precision.matmul is None
    if cell.pipeline == 1 and is_plain and not config.is_bit_equal:
        micro_batches = 1 if cell.ranks == 1 else 2 * cell.data
        micro_batch = config.train.global_batch // micro_batches
    train = {"recompute": cell.recompute, "micro_batch": micro_batch}
    return config.with_keys(parallel=parallel, train=train, optimizer={"zero": cell.zero})


def trainable_cells(config: Config, cells: Sequence[Cell]) -> tuple[list[Cell], list[str]]:
    """Return the cells at which the miniature can be trained, and the reasons why it cannot at the others."""
    trainable = []
    reasons: list[str] = []
    for cell in cells:
        cell_config = miniature_at_cell(config, cell)
        try:
            check_layout(cell_config, cell.ranks)
            _check_own_model(cell_config)
            trainable.append(cell)
        except ConfigError as error:
            reasons += error.problems
    return trainable, list(dict.fromkeys(reasons))


def _check_own_model(config: Config) -> None:
    if config.shapes is not None:
        return
    # Costly to import, for models of the user's own alone.
    from shardwise.models.user_model import check_user_model, takes

    if config.parallel.tensor > 1 and not takes(config.model.family, "group"):
        raise ConfigError(
            f"parallel.tensor must be 1: {config.model.family} takes no argument group, so it is not made of sharded "
            "layers, and only data parallelism and ZeRO can be verified"
        )
    check_user_model(config)
