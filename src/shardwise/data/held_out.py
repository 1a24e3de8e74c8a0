"""The row of a dry run about the held-out part of the data: its place, its size, and how much an evaluation reads."""

from __future__ import annotations

from shardwise.base.units import counted
from shardwise.config import Config


def held_out_text(config: Config, tokens: int | None = None, *, is_cut: bool = False) -> str:
    """Say what is held out of the training, and what the evaluations of the run read of it.

    Args:
        tokens: number of tokens that are held out; None if it is not known, as the data are not prepared yet.
        is_cut: True if the part lies after the training part, as in data that are tokens already.
    """
    data = config.data
    if not data.holds_out:
        return f"nothing (data.split={data.split}): `shardwise evaluate` needs a text of its own"
    place = _place(config, is_cut=is_cut)
    if tokens is None:
        return f"{place}; {_reading(config, None)}"
    sequences, odd_tokens = divmod(max(0, tokens - 1), config.train.sequence_length)
    size = f"{counted(tokens, 'token')}, {counted(sequences, 'full sequence')}"
    return f"{place}; {size}; {_reading(config, sequences, has_rest=odd_tokens > 0)}"


def _place(config: Config, *, is_cut: bool) -> str:
    data = config.data
    if data.mixture:
        return "a share of each source, as its split says"
    if data.split_names:
        return f"the split {data.split_names[1]}"
    first, share, _ = data.split_weights
    total = sum(data.split_weights)
    held_out = f"{100 * share / total:.3g}%"
    if data.streaming:
        return f"{held_out} of the first {counted(data.shuffle_buffer, 'document')}"
    if is_cut:
        return f"{held_out} of the documents, after the first {100 * first / total:.3g}%"
    return f"{held_out} of the text, whole documents from all over it, or the end of a text of few documents"


def _reading(config: Config, sequences: int | None, *, has_rest: bool = False) -> str:
    train = config.train
    if not train.eval_every:
        return "the run evaluates nothing (train.eval_every=0), `shardwise evaluate` all of it"
    most = train.eval_batches * train.global_batch
    if sequences is not None and sequences <= most:
        return "each evaluation reads these" + (", that of `shardwise evaluate` the rest too" if has_rest else "")
    return (
        f"an evaluation of the run reads its first {most:,} sequences (train.eval_batches × train.global_batch), "
        "`shardwise evaluate` all of it"
    )
