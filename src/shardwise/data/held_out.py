"""The row of a dry run about the held-out part of the data: its place, its size, and how much an evaluation reads."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.base.units import counted
from shardwise.config import DataConfig, TrainConfig

WHOLE_DOCUMENTS = "whole documents from all over it"
END_OF_TEXT = "its end, as its documents are few or long"
WHOLE_DOCUMENTS_OR_END = f"{WHOLE_DOCUMENTS}, or the end of a text of few documents"


@dataclass(frozen=True)
class HeldOut:
    """A held-out part, as far as it is known before a run.

    Attributes:
        place: the part of the text, for the user.
        tokens: number of its tokens; None if it is not known, as the data are not prepared yet.
        conversations: numbers of conversations in it and in the data; None if they are not known, or for other data.
    """

    place: str = WHOLE_DOCUMENTS_OR_END
    tokens: int | None = None
    conversations: tuple[int, int] | None = None


BUILT_IN = HeldOut(WHOLE_DOCUMENTS)
"""The held-out part of built-in data, which have many documents."""


def held_out_text(data: DataConfig, train: TrainConfig, part: HeldOut, *, is_cut: bool = False) -> str:
    """What is held out of the training: its place, its size, and how much of it the evaluations of the run read.

    Args:
        is_cut: True if the part lies after the training part, as in data that are tokens already.
    """
    if not data.holds_out:
        return f"nothing (data.split={data.split}): `shardwise evaluate` needs a text of its own"
    place = _place(data, part, is_cut=is_cut)
    if part.conversations is not None:
        # A sequence has one conversation at least.
        return f"{place}; {_evaluated(train, part.conversations[0])}"
    if part.tokens is None:
        return f"{place}; {_evaluated(train, None)}"
    tokens = part.tokens
    if data.packs_documents:
        # The number of packed sequences is known once a run has packed them.
        return f"{place}; {counted(tokens, 'token')}; {_evaluated(train, None)}"
    sequences, odd_tokens = divmod(max(0, tokens - 1), train.sequence_length)
    size = f"{counted(tokens, 'token')}, {counted(sequences, 'full sequence')}"
    return f"{place}; {size}; {_evaluated(train, sequences, has_rest=odd_tokens > 0)}"


def _place(data: DataConfig, part: HeldOut, *, is_cut: bool) -> str:
    if data.mixture:
        return "a share of each source, as its split says"
    if data.split_names:
        return f"the split {data.split_names[1]}"
    first, share, _ = data.split_weights
    total = sum(data.split_weights)
    held_out = f"{100 * share / total:.3g}%"
    if part.conversations is not None:
        chosen, number = part.conversations
        return f"{chosen:,} of {counted(number, 'conversation')}, by the {held_out} of data.split"
    if data.streaming:
        return f"{held_out} of the first {counted(data.shuffle_buffer, 'document')}"
    if is_cut:
        return f"{held_out} of the documents, after the first {100 * first / total:.3g}%"
    return f"{held_out} of the text, {part.place}"


def _evaluated(train: TrainConfig, sequences: int | None, *, has_rest: bool = False) -> str:
    if not train.eval_every:
        return "the run evaluates nothing (train.eval_every=0), `shardwise evaluate` all of it"
    most = train.eval_batches * train.global_batch
    if sequences is not None and sequences <= most:
        rest = ", `shardwise evaluate` also the last, incomplete one" if has_rest else ""
        return f"each evaluation reads all of them{rest}"
    return (
        f"an evaluation of the run reads its first {most:,} sequences (train.eval_batches × train.global_batch), "
        "`shardwise evaluate` all of it"
    )
