"""The pictures of docs/concepts.md are what the code draws now."""

import pytest

from scripts import concept_pictures
from scripts.tutorial_common import IMAGES
from tests.arch.source import ROOT

STALE = "concept-{}.svg is not current: run `python -m scripts.concept_pictures`"
PAGE = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")


def committed(name: str) -> str:
    return (IMAGES / f"concept-{name}.svg").read_text(encoding="utf-8")


def test_the_pictures_are_current_and_the_page_shows_each() -> None:
    for name, picture in concept_pictures.drawn().items():
        assert committed(name) == str(picture), STALE.format(name)
    names = sorted(path.name for path in IMAGES.glob("concept-*.svg"))
    assert names == sorted(f"concept-{name}.svg" for name in ("checkpoint", "memory", "pipeline", "placement"))
    assert all(f"](images/{name})" in PAGE for name in names)


@pytest.mark.slow
def test_the_picture_of_a_checkpoint_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert committed("checkpoint") == str(concept_pictures.checkpoint_picture(concept_pictures.trained()))
