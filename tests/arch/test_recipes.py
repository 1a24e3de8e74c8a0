"""Every shipped recipe is valid, and quickly so."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.quickstart_layout import overrides
from shardwise.config import load_config
from tests.arch.source import PACKAGE

RECIPES = sorted(path.stem for path in (PACKAGE / "recipes").glob("*.yaml"))


def test_the_recipes_of_this_version_are_here() -> None:
    assert {"quickstart", "llama2-tiny"} <= set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_valid(recipe: str) -> None:
    start = time.perf_counter()
    config = load_config(recipe, [])
    layout = config.check(config.parallel.tensor)
    assert layout.data == 1
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.endswith("-tiny")])
def test_tiny_recipe_holds_its_promise(recipe: str) -> None:
    """Tiny recipes are compared across layouts at 1e-5 relative: above LR 1e-3 rounding alone would grow past that."""
    config = load_config(recipe, [])
    assert config.precision.resolved(accelerator=False).parameter == "float32"
    assert config.optimizer.lr <= 1e-3
    assert config.model.num_attention_heads >= 4
    assert config.model.num_hidden_layers >= 8


@pytest.mark.parametrize("recipe", RECIPES)
def test_printed_recipe_is_the_shipped_file(recipe: str, tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("shardwise")
    result = subprocess.run([script, "recipes", recipe], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == (PACKAGE / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("accelerators", [1, 2, 3, 4, 6, 8, 16])
def test_the_quickstart_runs_on_any_number_of_accelerators(accelerators: int) -> None:
    layout = load_config("quickstart", overrides(accelerators)).check(accelerators)
    assert (layout.data, layout.tensor) == (accelerators, 1)


def test_without_accelerators_the_quickstart_is_the_recipe() -> None:
    assert overrides(0) == []
