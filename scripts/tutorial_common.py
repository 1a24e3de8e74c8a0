"""What the tutorials' measurements share: how a figure looks, where its numbers are kept, and tables inside a page.

A script `scripts/tutorial_NAME.py` measures, writes docs/images/NAME.json and NAME.svg, and puts its tables into
docs/tutorials/NAME.md, between the marks `<!-- NAME:begin -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import PeakMemory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.config import Config
    from shardwise.distributed.mesh import Mesh
    from shardwise.train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
IMAGES, PAGES = ROOT / "docs" / "images", ROOT / "docs" / "tutorials"
MIB = 2**20

# Grey that has the same contrast to white and to a dark page; Okabe and Ito's colours, told apart by colour-blind eyes.
INK = "#77797d"
BLUE, ORANGE, GREEN, VERMILION = "#0072b2", "#e69f00", "#009e73", "#d55e00"
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "shardwise",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK
    ),
}


@dataclass(frozen=True)
class Target:
    """Where one tutorial's results go. Without `folder` into the documentation, its page included."""

    name: str
    folder: Path | None = None

    def path(self, suffix: str) -> Path:
        return (self.folder or IMAGES) / f"{self.name}.{suffix}"

    def load(self) -> dict[str, Any]:
        results: dict[str, Any] = json.loads(self.path("json").read_text(encoding="utf-8"))
        return results

    def save(self, results: Mapping[str, Any]) -> None:
        self.path("json").parent.mkdir(parents=True, exist_ok=True)
        self.path("json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def draw(self, figure: Figure) -> None:
        """Save as SVG with a transparent ground; the same figure gives the same bytes."""
        figure.savefig(self.path("svg"), transparent=True, metadata={"Date": None})
        text = self.path("svg").read_text(encoding="utf-8")
        self.path("svg").write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")

    def publish(self, text: str) -> None:
        """Put text between the page's marks; elsewhere than in the documentation, print it alone."""
        print(text)
        if self.folder is None:
            page = PAGES / f"{self.name}.md"
            before, _, after = cut(page.read_text(encoding="utf-8"), self.name)
            page.write_text(f"{before}{text}\n{after}", encoding="utf-8")


def cut(page: str, name: str) -> tuple[str, str, str]:
    """A page up to its begin mark, what lies between the marks, and the rest."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    before, middle = page.split(begin)
    inside, after = middle.split(end)
    return before + begin, inside, end + after


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every tutorial's script has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="DIR", type=Path, help="write there and leave the documentation as it is")
    parser.add_argument("--redraw", action="store_true", help="draw and tabulate the numbers of an earlier run again")
    return parser


def random_trainer(config: Config, mesh: Mesh) -> Trainer:
    """A trainer on random tokens, for what does not depend on the text. Sentence pairs where the model takes pairs."""
    import numpy as np

    from shardwise.data.formats.prepared_data import PreparedText
    from shardwise.data.rows import Sentences
    from shardwise.data.tokens.tokenizer import PairTokens
    from shardwise.train.build import build_trainer

    count, vocabulary = 2**16, config.model.vocab_size
    tokens = np.random.default_rng(0).integers(5, vocabulary, count).astype(np.uint16)
    bounds = np.arange(0, count + 1, 32)
    parts: dict[str, Any] = {}
    if "nsp" in config.model.objectives:
        pairs = Sentences(bounds, np.arange(0, len(bounds), 16))
        special = PairTokens(pad=0, unk=1, cls=2, sep=3, mask=4)
        parts = {"sentences": {"train": pairs, "eval": pairs}, "pair_tokens": special}
    rows = {"train": tokens, "eval": tokens, "test": tokens[:0]}
    data = PreparedText(Path(), "random", "random", rows, vocabulary, **parts)
    return build_trainer(config, mesh, data)


def peak_of_steps(config: Config, small: Config, steps: int) -> int:
    """On one rank: peak resident bytes of training a few steps, above what stands after a step of a small model.

    That step touches the pages of the libraries that any step touches: they belong to Python and torch, not to a model.
    """
    from shardwise.distributed.mesh import Mesh

    mesh = Mesh(tensor=config.parallel.tensor, device="cpu")
    random_trainer(small, mesh).step()
    memory = PeakMemory()
    trainer = random_trainer(config, mesh)
    for _ in range(steps):
        trainer.step()
    return memory.above()


def mib(size: float) -> str:
    return f"{size / MIB:,.0f} MiB" if size >= 10 * MIB else f"{size / MIB:,.1f} MiB"


def overridden(recipe: str | Path, *groups: Sequence[str]) -> Config:
    """A recipe with lists of key=value, the later ones stronger."""
    from shardwise.config import load_config

    return load_config(str(recipe), [override for group in groups for override in group])
