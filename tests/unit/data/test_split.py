"""The held-out part: its share, whole documents, and nothing lost."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.formats.text import plan_text_split
from shardwise.data.reading.text_sources import TextPiece


def divided(texts: list[list[str]], weights: tuple[float, float]) -> tuple[dict[str, str], bool]:
    sizes = np.array([sum(map(len, document)) for document in texts], dtype=np.int64)
    split = plan_text_split(sizes, weights)
    pieces = [TextPiece(text, at == len(document) - 1) for document in texts for at, text in enumerate(document)]
    parts = {"train": "", "eval": ""}
    for part, piece in split.parts(pieces):
        parts[part] += piece.text + ("|" if piece.ends_document else "")
    return parts, split.held_out is not None


def test_many_documents_are_held_out_whole_and_from_everywhere() -> None:
    texts = [[f"document {number}\n" * (number % 7 + 1)] for number in range(400)]
    parts, whole = divided(texts, (95, 5))
    assert whole
    held = [text for text in parts["eval"].split("|") if text]
    assert set(held) <= {document[0] for document in texts}
    total = sum(len(document[0]) for document in texts)
    assert 0.75 * 0.05 <= sum(map(len, held)) / total <= 0.05
    assert divided(texts, (95, 5))[0] == parts
    assert divided(texts, (0.95, 0.05))[0] == parts
    held_out = plan_text_split(np.full(1000, 10, dtype=np.int64), (90, 10)).held_out
    assert all(part.any() for part in np.array_split(held_out, 10))


def test_one_long_document_gives_its_end_from_the_start_of_a_line() -> None:
    lines = [f"line {number:04d}\n" for number in range(1000)]
    parts, whole = divided([["".join(lines[:300]), "".join(lines[300:])]], (9, 1))
    assert not whole
    assert parts["train"] + parts["eval"] == "".join(lines) + "|"
    assert parts["eval"].startswith("line 09")
    # Without lines at the share, and nothing at the weight 0.
    assert divided([["abcdefghij"]], (80, 20))[0] == {"train": "abcdefgh", "eval": "ij|"}
    assert divided([["abcdefghi\n"]], (80, 20))[0] == {"train": "abcdefgh", "eval": "i\n|"}
    assert divided([["abc"], ["def"]], (1, 0))[0] == {"train": "abc|def|", "eval": ""}


@settings(deadline=None, max_examples=50)
@given(
    texts=st.lists(st.lists(st.text("ab\n", min_size=1, max_size=30), min_size=1, max_size=3), min_size=1, max_size=30),
    weights=st.tuples(st.floats(0.1, 100), st.floats(0, 100)),
)
def test_every_character_is_in_one_part(texts: list[list[str]], weights: tuple[float, float]) -> None:
    parts, whole = divided(texts, weights)
    everything = ["".join(document) for document in texts]
    if whole:
        assert sorted((parts["train"] + parts["eval"]).split("|")) == sorted([*everything, ""])
    else:
        assert parts["train"].replace("|", "") + parts["eval"].replace("|", "") == "".join(everything)
    share = sum(map(len, everything)) * weights[1] / sum(weights)
    assert share < 1 or parts["eval"]
