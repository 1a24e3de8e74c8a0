"""What the end of a document changes in a sample, against the definitions written out token by token."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError
from shardwise.data.formats.prepared_data import document_ends
from shardwise.data.samples.batch import IGNORE
from shardwise.data.samples.causal import DocumentEnds, causal_batch
from shardwise.data.tokens.tokenizer import train_tokenizer
from tests.unit.data.small_runs import config

END = 0


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=8), min_size=1, max_size=4),
    masks=st.booleans(),
    targets=st.integers(0, 7),
)
@settings(deadline=None)
def test_each_token_by_hand(rows: list[list[int]], masks: bool, targets: int) -> None:
    ends = DocumentEnds(END, masks, reset_position_ids=True, reset_attention_mask=True)
    batch = causal_batch(np.array(rows), np.full(len(rows), targets), np.arange(len(rows)), ends)
    counted = 0
    for column, row in enumerate(rows):
        start = 0
        for place, token in enumerate(row[:-1]):
            if 0 < place <= targets and row[place - 1] == END:
                start = place  # behind the last token no document begins: there is padding
            counts = place < targets and not (masks and token == END)
            counted += counts
            found = {name: array[place, column] for name, array in batch.inputs.items()}
            assert found == {
                "ids_SB": token,
                "targets_SB": row[place + 1] if counts else IGNORE,
                "positions_SB": place - start,
                "starts_SB": start,
            }, f"place {place} of {row}"
    assert batch.counts.tolist() == [counted]


def test_only_what_is_asked_for_is_in_the_batch() -> None:
    rows = np.array([[1, END, 2, 3]])
    for asked, names in (
        ({"mask_loss": True}, set()),
        ({"reset_position_ids": True}, {"positions_SB"}),
        ({"reset_attention_mask": True}, {"starts_SB"}),
    ):
        batch = causal_batch(rows, np.array([3]), np.array([0]), DocumentEnds(END, **asked))
        assert batch.inputs.keys() == {"ids_SB", "targets_SB", *names}
    assert causal_batch(rows, np.array([3]), np.array([0]), None).counts.tolist() == [3]


def test_the_token_is_the_tokenizers_unless_it_is_named(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a b c"], 257, "test")
    tokenizer.save(tmp_path)
    assert document_ends(config(family="gpt", path="x").data, tmp_path) is None
    masked = config(family="gpt", path="x", eod_mask_loss=True)
    assert document_ends(masked.data, tmp_path) == DocumentEnds(tokenizer.end_of_document_id, True)
    named = config(family="gpt", path="x", reset_attention_mask=True, eod_token=7)
    assert document_ends(named.data, None) == DocumentEnds(7, reset_attention_mask=True)
    with pytest.raises(ConfigError) as caught:
        document_ends(config(family="gpt", path="x", reset_position_ids=True).data, None)
    assert caught.value.problems == [
        "data.reset_position_ids (true) needs the id of the token that ends a document: set data.eod_token, or "
        "data.tokenizer to the one that made the data"
    ]
