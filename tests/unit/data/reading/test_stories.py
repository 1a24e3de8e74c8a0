"""The built-in stories, `data.dataset=stories`."""

import hashlib
import re
from itertools import islice

from shardwise.data.reading.stories import STORIES, stories


def test_the_text_is_the_same_in_every_installation() -> None:
    """A change of the words or the sentences is one of the quickstart's results too."""
    texts = list(stories())
    assert len(texts) == len(set(texts)) == STORIES
    assert hashlib.sha256("".join(texts).encode()).hexdigest()[:16] == "83a3501b37b40863"


def test_stories_are_sentences_of_words() -> None:
    for text in islice(stories(), 0, None, 4):
        assert text.endswith("\n")
        assert not re.search(r"[{}]|  |\ba [aeiou]", text), text
        # Each sentence begins with a capital letter, and each quotation ends.
        assert not re.search(r"(^|[.!?] \"?)[a-z]", text), text
        assert text.count('"') % 2 == 0, text
