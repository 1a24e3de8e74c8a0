"""Recipe files: their names and texts, and YAML that is read and written."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from shardwise.base.errors import ConfigError, listing, nearest_name, see
from shardwise.base.files import read_small, reason_of, user_path
from shardwise.base.yaml_and_json import dump_yaml, parse_yaml
from shardwise.config.run_config import Config

_RECIPES = Path(__file__).parent / "recipes"
_SUFFIXES = (".yaml", ".yml")
_DATA_COMMENT = r"(?m)^ *# ((?:\S.*: +|  +)data\..+)"
"""A comment of a recipe that names data for it, such as `# For a trial:  data.dataset=python`, or continues one."""
_OWN_DATA = r"Your own data: +((?:data\.\S+ ?)+)"
_MODEL_COMMENT = r"(?m)^# (Before longer texts: .+(?:\n#  +.+)*)"
_RATE_COMMENT = r"(?m)^ *# (Learning rate: .+(?:\n *#  +.+)*)"


@cache
def _shipped() -> frozenset[str]:
    return frozenset(path.stem for path in _RECIPES.glob("*.yaml"))


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(_shipped())


def is_model_recipe(recipe: str) -> bool:
    """Return whether a recipe's name is that of a model: a `config.json`, a folder that holds one, or a hub id."""
    if not recipe or recipe.endswith(_SUFFIXES) or recipe in _shipped():
        return False
    path = user_path(recipe)
    if path.is_dir():
        return (path / "config.json").is_file() and not (path / "config.yaml").is_file()
    if path.exists():
        return path.suffix == ".json"
    # Costly to import, for a name with a slash alone.
    from shardwise.base import hub

    return "/" in recipe and hub.is_hub_name(recipe.partition("@")[0]) and not hub.can_only_be_path(recipe)


def recipe_text(recipe: str, *, cached: bool = False) -> str:
    """The YAML of a shipped recipe's name, of a file, or of what a model stands for (`config/model_recipes.py`).

    Raises:
        ConfigError: the recipe is unknown, or its file cannot be read.
    """
    if is_model_recipe(recipe):
        # Costly to import, for a model alone.
        from shardwise.config.model_recipes import comment_and_sections

        comment, sections = comment_and_sections(recipe, recipe_name(recipe), recipe_names(), cached=cached)
        return f"{comment}\n{dump_yaml(sections)}"
    is_file = recipe.endswith((*_SUFFIXES, ".json")) or "/" in recipe
    if not is_file and recipe not in _shipped():
        near = nearest_name(recipe, recipe_names(), cutoff=0.4)
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(
            f"unknown recipe {recipe!r}: {hint}shipped recipes are {listing(recipe_names())}; "
            "a path to your own ends with .yaml, and a model of the hub reads owner/name"
        )
    path = user_path(recipe) if is_file else _RECIPES / f"{recipe}.yaml"
    if is_file and (path / "config.yaml").is_file():
        raise ConfigError(
            f"the recipe file {recipe} is a run's folder: `shardwise train --run-dir {recipe}` continues the run, and "
            f"{recipe}/config.yaml is its configuration"
        )
    if is_file and path.is_dir():
        raise ConfigError(f"RECIPE ({recipe}) must be a recipe or a model, and the folder holds no config.json")
    try:
        with path.open("rb") as file:  # it may be a pipe, as the shell makes of <(command)
            return read_small(file, path).decode()
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe file {recipe}") from None
    except OSError as error:
        raise ConfigError(f"the recipe file {recipe} cannot be read: {reason_of(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the recipe file {recipe} cannot be read: it must be a text in UTF-8") from None


def recipe_name(recipe: str) -> str:
    """The short name of a recipe, after which its runs are named: `llama` of `my/llama.yaml` or `llama/config.json`."""
    path = Path(recipe)
    if path.name in ("config.json", "", ".."):
        return (path.parent if path.name == "config.json" else path).resolve().name
    return path.stem if recipe.endswith(_SUFFIXES) else path.name.partition("@")[0]


def own_data(recipe: str) -> str:
    """The keys of a recipe that name a user's own data, as its comment has them."""
    comment = re.search(_OWN_DATA, recipe_text(recipe))
    return comment[1].strip() if comment else "data.path=YOUR_TEXT.jsonl"


def carried_comments(recipe: str, config: Config) -> str:
    """The comments of a recipe's file that one made of it needs too: on what is kept, and on data if none are named."""
    text = recipe_text(recipe)
    keys = parse_yaml(text, recipe)
    comments: list[str] = []
    if (keys.get("model") or {}).get("max_position_embeddings") == config.model.max_position_embeddings:
        comments += re.findall(_MODEL_COMMENT, text)
    if (keys.get("optimizer") or {}).get("lr") == config.optimizer.lr:
        comments += re.findall(_RATE_COMMENT, text)
    if config.names_no_data:
        data_comments: list[str] = re.findall(_DATA_COMMENT, text)
        if (keys.get("model") or {}).get("vocab_size") != config.model.vocab_size:
            # A remark in parentheses is on the tokenizer of the vocabulary that the recipe has.
            data_comments = [re.sub(r" \(.*\)$", "", comment) for comment in data_comments]
        comments += data_comments
    lines = [re.sub(r"^ *# ", "", line) for comment in comments for line in comment.split("\n")]
    return "".join(f"# {line}\n" for line in lines)


def require_data(config: Config, recipe: str) -> None:
    """Raise ConfigError for a recipe without data; the error shows the data that comments in its file name."""
    if config.names_no_data:
        lines = re.findall(_DATA_COMMENT, recipe_text(recipe)) or ["For a trial:  data.dataset=python"]
        shown = "\n".join(f"  {line}" for line in lines)
        raise ConfigError(
            f"{recipe_name(recipe)} must name its data by data.path, data.blend or data.dataset"
            f"{see('runs#no-data-named')}:\n{shown}"
        )
