"""Full-precision loss curves of the tiny recipes, committed, and equal at every layout.

The files in `curves/` come from one process. After a change that is meant to alter training, write them anew with
`python -m tests.golden.test_curves` and say in the commit message why the numbers moved.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import load_config
from shardwise.data.open_data import prepare_data
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import cases
from tests.e2e.command import metrics, shardwise
from tests.sweeps import few

CURVES = Path(__file__).parent / "curves"
RECIPES = cases("golden recipes")
TOLERANCE = 1e-5
Curve = dict[str, list[float]]
LAYOUTS = cases("golden layouts")
# Every layout of every family: tests/dist/test_cells.py. In one process, the Llama is the one with scaled positions.
CELLS = [("llama2-tiny", layout) for layout in LAYOUTS if "ep" not in layout]
CELLS += [(recipe, "one-process") for recipe in RECIPES if recipe != "llama2-tiny"]


def train(recipe: str, overrides: list[str], cache: Path, steps: int | None = None) -> Curve:
    """Loss and gradient norm of the first steps, or of all, on this rank, by the names of metrics.jsonl."""
    torch.set_num_threads(1)
    config = load_config(recipe, overrides)
    mesh = shared_mesh(config.parallel.tensor, expert=config.parallel.expert)
    trainer = build_trainer(config, mesh, prepare_data(config, cache))
    records = [trainer.step() for _ in range(steps or config.train.steps)]
    return {"loss": [record.loss for record in records], "grad_norm": [record.grad_norm for record in records]}


def fingerprint(recipe: str, cache: Path) -> str:
    """Of the recipe's data, tokens included."""
    return prepare_data(load_config(recipe, []), cache).fingerprint


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def golden(recipe: str) -> dict[str, Any]:
    curve: dict[str, Any] = json.loads((CURVES / f"{recipe}.json").read_text())
    return curve


def compare(recipe: str, found: Curve, steps: int | None = None) -> None:
    """`steps`: those that were taken, if not all."""
    committed = golden(recipe)
    for quantity in ("loss", "grad_norm"):
        wanted = committed[quantity][:steps]
        errors = [abs(a - b) / abs(b) for a, b in zip(found[quantity], wanted, strict=True)]
        step = max(range(len(errors)), key=errors.__getitem__)
        assert errors[step] <= TOLERANCE, (
            f"{recipe}: {quantity} of step {step + 1} is {found[quantity][step]!r}, the committed curve has "
            f"{wanted[step]!r} (off by {errors[step]:.1e}, at most {TOLERANCE:.0e})"
        )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_data_is_that_of_the_curve(recipe: str, cache: Path) -> None:
    assert fingerprint(recipe, cache) == golden(recipe)["data"], (
        f"the text or the tokens of {recipe} changed, so its curve does too: that is no fault of the layouts"
    )


@pytest.mark.parametrize(("recipe", "layout"), few(CELLS, ("llama3-tiny", "one-process"), ("gpt-tiny", "one-process")))
def test_curve_is_the_committed_one(recipe: str, layout: str, ranks: Any, cache: Path) -> None:
    world, overrides = LAYOUTS[layout]
    for found in ranks(world).run(train, recipe, overrides, cache):
        compare(recipe, found)


def test_a_sparse_curve_begins_as_the_committed_one(ranks: Any, cache: Path) -> None:
    world, overrides = LAYOUTS["dp2-ep2"]
    for found in ranks(world).run(train, "olmoe-tiny", overrides, cache, 6):
        compare("olmoe-tiny", found, 6)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_command_trains_the_committed_curve(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shardwise("train", recipe, *RECIPES[recipe], "--run-dir", run, at=tmp_path).succeeded()
    steps = metrics(run, "step")
    compare(recipe, {quantity: [step[quantity] for step in steps] for quantity in ("loss", "grad_norm")})


def test_the_curves_show_learning() -> None:
    """A curve that stays flat would be equal at any layout, whatever the optimizer does."""
    for recipe in RECIPES:
        losses = golden(recipe)["loss"]
        assert losses[-1] < 0.96 * losses[0], f"{recipe} does not learn"


def main() -> None:
    """Write the curves of all recipes, each from one process."""
    for recipe in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder)
            config = load_config(recipe, [])
            curve = {"recipe": recipe, "steps": config.train.steps, "data": fingerprint(recipe, cache)}
            curve |= train(recipe, [], cache)
        (CURVES / f"{recipe}.json").write_text(json.dumps(curve, indent=1) + "\n")
        print(f"wrote {CURVES / recipe}.json")


if __name__ == "__main__":
    main()
