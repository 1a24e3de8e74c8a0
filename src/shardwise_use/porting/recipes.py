"""A recipe made of the settings of another program, with a row for each of them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.base.errors import ConfigError, DataError, listing
from shardwise.base.files import read_small, reason_of, user_path
from shardwise.base.yaml_and_json import json_value, parse_yaml, yaml_scalar
from shardwise.config import Config, apply_overrides, config_from_sections
from shardwise.config.layout_rules import length_problems
from shardwise.config.other_names import FACT_WORDS, FACTS, FAMILY_FACTS, OTHER_NAMES, PROGRAMS, WITHOUT_KEY, WORDS
from shardwise.config.pydantic_errors import known_paths
from shardwise.config.suggestions import is_key_or_option
from shardwise.config.translation import Setting, is_integer_key, translate_settings
from shardwise_use.porting.implied_settings import implied_settings, with_scheduler_arguments, with_scheduler_first
from shardwise_use.porting.python_configs import UnknownPythonValue, python_settings
from shardwise_use.porting.shell_scripts import script_commands

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_FILE = "job.config_file"  # the option of torchtitan before 0.3 that names the TOML with the settings
_OPTIONS = ("--run-dir", "--nproc")  # options of `shardwise train` that settings of other programs give
_UNKNOWN = {
    "_component_": "torchtune",
    "_target_": "Megatron Bridge, or of another program of Hydra",
    "pipe_parallel_size": "GPT-NeoX",
}
"""Settings of programs that are not read, whose configs have names of others too."""


class _Translation(NamedTuple):
    """A recipe made of another program's settings (`rows`), what is wrong with it, and options of `shardwise train`."""

    program: str
    sections: dict[str, dict[str, Any]]
    rows: list[Setting]
    problems: list[str]
    options: dict[str, Any]


def recipe_of(file: str, overrides: Sequence[str] = ()) -> _Translation:
    """The recipe that does what a training script or config of another program says.

    Args:
        file: its path; of a Python file with several configs, `PATH:NAME`.
        overrides: keys of ours, as `key=value`, that count instead.

    Raises:
        ConfigError: the file cannot be read, or is of none of the programs or of two.
    """
    program, settings = _settings(file)
    implied = implied_settings(program, settings, _given_steps(overrides))
    settings = with_scheduler_first({**settings, **implied})
    family, told = _family(program, settings)

    def has(target: str) -> bool:
        return is_key_or_option(target, known_paths(family), _OPTIONS)

    known = {} if family in ("", *told) else {"model.family": family}
    rows = _rows(program, settings, known, has)
    rows += [
        Setting(name, value, {"model.family": family} if family else {}, "" if family else "no family is like that")
        for name, value in settings.items()
        if name in FACTS and not _record_name(program, name)
    ]
    keys = {**{key: mapped for key, mapped in PROGRAMS[program].keys.items() if has(key)}, **known}
    for row in rows:
        keys |= row.keys
    if (size := _tokens_of(keys)) is not None:
        keys["model.vocab_size"] = size
        rows.append(Setting("data.tokenizer", keys["data.tokenizer"], {"model.vocab_size": size}))
    rows = [_with_last_values(row, keys, implied) for row in rows]
    options = {key: keys.pop(key) for key in list(keys) if key.startswith("--")}
    sections = _sections(keys)
    problems = apply_overrides(sections, overrides)
    try:
        config = config_from_sections(sections, problems, typed=[override.partition("=")[0] for override in overrides])
        problems = length_problems(config.model, config.train, config.optimizer)
    except ConfigError as error:
        problems = error.problems
    sections = {name: sections[name] for name in Config.model_fields if name in sections}
    return _Translation(program, sections, [row for row in rows if _is_told(row, program)], problems, options)


def _given_steps(overrides: Sequence[str]) -> int | None:
    values = [override.partition("=")[2] for override in overrides if override.startswith("train.steps=")]
    steps = yaml_scalar(values[-1]) if values else None
    return steps if isinstance(steps, int) else None


def _record_name(program: str, name: str) -> str | None:
    names = (f"{program}:{name}", name)
    return next((known for known in names if known in OTHER_NAMES or known in WORDS or known in WITHOUT_KEY), None)


def _rows(
    program: str, settings: Mapping[str, Any], known: Mapping[str, Any], has: Callable[[str], bool]
) -> list[Setting]:
    def find(name: str) -> str | None:
        return _record_name(program, name)

    asked = {name: value for name, value in settings.items() if find(name) or name not in FACTS}
    # Code, and a variable that the file does not set, cannot be read.
    readable = {n: v for n, v in asked.items() if not isinstance(v, UnknownPythonValue) and "$" not in str(v)}
    # A config of torchtitan's package has values that the defaults of its classes are not.
    is_whole = not {"config", _FILE} & settings.keys()
    # What is given and cannot be read is not left out.
    given = {**dict.fromkeys(asked), **readable}
    rows = list(translate_settings(given, program if is_whole else None, known, has, find))
    left_out = [name for name, value in readable.items() if value == -1]
    rows += [Setting(name, -1, reason=WITHOUT_KEY.get(find(name) or "", "nothing to set")) for name in left_out]
    for name, value in asked.items():
        if name not in readable:
            rows.append(Setting(name, value, reason="its value is not in the file" if find(name) else ""))
    return rows


def _with_last_values(row: Setting, keys: Mapping[str, Any], implied: Mapping[str, Any]) -> Setting:
    """A row with the values that its keys have at the end, by all settings; `implied`: what the file leaves out."""
    is_decay = row.name == "lr_scheduler.decay_ratio" and "optimizer.decay_steps" in row.keys
    is_cut = is_decay and float(row.value) * keys.get("train.steps", 0) > keys["optimizer.decay_steps"] + 1.5
    reason = "torchtitan shortens a decay to the steps after the warmup" if is_cut else row.reason
    values = {key: keys[key] for key in row.keys}
    return replace(row, keys=values, reason=reason, is_default=row.is_default or row.name in implied)


def _tokens_of(keys: Mapping[str, Any]) -> int | None:
    """The tokens of the tokenizer that is named, where nothing says the vocabulary and it can be read here."""
    name = keys.get("data.tokenizer")
    if {"model.vocab_size", "model.config"} & keys.keys() or not isinstance(name, str) or not user_path(name).exists():
        return None
    from shardwise.data.tokens.tokenizer import Tokenizer  # costly to import, for this alone

    try:
        return Tokenizer.load(user_path(name)).vocab_size
    except DataError:
        return None


def _is_told(row: Setting, program: str) -> bool:
    """False for what a program leaves out, does by default where that is nothing here, or says of other things."""
    says_nothing = not row.reason and re.search(PROGRAMS[program].ignored, f"{row.name}={row.value}")
    is_idle = row.reason in ("", "nothing to set")
    if not row.is_default:
        is_idle = row.value is False or row.value in _EMPTY or bool(says_nothing) or (row.value == 0 and not row.reason)
    return bool(row.keys) or not is_idle


def _sections(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, Any] = {name: {} for name in Config.model_fields}
    for key, value in sorted(keys.items(), key=lambda item: item[0] != "model.family"):
        *owners, name = key.split(".")
        section = sections
        for owner in owners:
            section = section.setdefault(owner, {})
        if isinstance(value, float) and value.is_integer() and is_integer_key(key):
            value = int(value)
        section[name] = value.replace(" ", "") if key == "data.split" else value
    return {name: section for name, section in sections.items() if section}


def _family(program: str, settings: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The family of the model, empty if nothing says it, and the families that a setting names itself."""
    named: list[str] = []
    for name, value in settings.items():
        words = WORDS.get(name, {}).get(str(value).lower())
        if isinstance(words, dict) and "model.family" in words:
            named.append(words["model.family"])
        elif "model.family" in OTHER_NAMES.get(name, ()):
            named += [mapped for mapped in [WORDS["model.family"].get(str(value).lower())] if isinstance(mapped, str)]
    named += [family for key, family in PROGRAMS[program].keys.items() if key == "model.family"]
    if named:
        return named[-1], tuple(named)
    facts: dict[str, Any] = {}
    for source in (PROGRAMS[program].defaults, settings):
        for name, value in source.items():
            fact, _, fixed = FACTS.get(name, "").partition("=")
            if fact and (source is settings or name not in settings) and value is not None:
                is_on = str(value).lower() not in ("false", "none")
                said = FACT_WORDS.get(str(value).lower(), value) if not fixed else fixed if is_on else not fixed
                facts[fact] = str(said).lower()
    fits = [
        family
        for family, own in FAMILY_FACTS.items()
        if facts and all(str(own.get(fact, said)).lower() == said for fact, said in facts.items())
    ]
    return (fits[0] if fits else ""), ()


def _settings(file: str) -> tuple[str, dict[str, Any]]:
    path, _, wanted = file.rpartition(":") if ".py:" in file else (file, "", "")
    place = user_path(path)
    candidates = list(_candidates(_text(place), place, wanted))
    scores = [(_marks(settings, _program(settings)), settings) for settings in candidates]
    best = max(scores, key=lambda item: item[0], default=(0, {}))[0]
    programs = listing((program.title for program in PROGRAMS.values()), "or")
    paths = {name for settings in candidates for name in settings}
    # Parts of NeMo's configs have a _target_ too.
    names = paths | {path.rpartition(".")[2] for path in paths} - {"_target_"}
    if other := next((name for name in _UNKNOWN if name in names), None):
        raise ConfigError(
            f"--from ({file}) must have arguments or a config of {programs}, and {other} is a name of {_UNKNOWN[other]}"
        )
    if best == 0:
        raise ConfigError(
            f"--from ({file}) must have arguments or a config of {programs}, and none of their names is in it"
        )
    # The last of equal commands trains; the ones before it often compile.
    settings = [settings for score, settings in scores if score == best][-1]
    program = _program(settings)
    found = {_program(other) for score, other in scores if score > 1 or score == best}
    others = settings.keys() - PROGRAMS[program].names
    while _marks(others, name := _program(others)) > 1:
        found.add(name)
        others -= PROGRAMS[name].names
    if len(found) > 1:
        titles = listing(sorted(PROGRAMS[name].title for name in found))
        raise ConfigError(f"--from ({file}) must be of one program, and it has settings of {titles}: keep those of one")
    return program, settings


def _text(place: Path) -> str:
    try:
        with place.open("rb") as opened:
            return read_small(opened, place).decode()
    except OSError as error:
        raise ConfigError(f"--from ({place}) cannot be read: {reason_of(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--from ({place}) must be a text in UTF-8: it holds other bytes") from None


def _marks(settings: Iterable[str], program: str) -> int:
    return len(PROGRAMS[program].marks.intersection(settings))


def _program(settings: Iterable[str]) -> str:
    return max(PROGRAMS, key=lambda name: _marks(settings, name))


def _candidates(text: str, place: Path, wanted: str) -> Iterator[dict[str, Any]]:
    kind = place.suffix.lower()
    try:
        if kind == ".json" or (kind not in (".sh", ".py", ".toml", ".yaml", ".yml") and text.lstrip().startswith("{")):
            yield _completed(_flat(json_value(text)), place)
        elif kind == ".toml":
            yield _completed(_flat(tomllib.loads(text)), place)
        elif kind in (".yaml", ".yml"):
            yield _completed(_flat(parse_yaml(text, f"--from ({place})")), place)
        elif kind == ".py":
            yield _completed(python_settings(text, str(place), wanted), place)
        else:
            for settings in script_commands(text, place.parent):
                named = str(settings.get(_FILE))
                for file in [file for file in (place.parent / named, user_path(named)) if file.is_file()][:1]:
                    # What the command line has counts instead of the file's.
                    try:
                        settings = _completed(_flat(tomllib.loads(_text(file))), file) | settings
                    except ValueError as error:
                        raise ConfigError(f"--{_FILE} ({file}) cannot be read: it must be TOML ({error})") from None
                    del settings[_FILE]
                yield _completed(settings, place)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--from ({place}) cannot be read: {error}") from None


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings by dotted names; a list of mappings by its first one and its length."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {f"{path}.count": len(value), **_flat(value[0], path)}
    if not isinstance(value, dict) or not value:
        return {path: value}
    if set(value) - {"_CLASS_"} == {"value", "unit"}:  # a duration of OLMo-core
        return {f"{path}.{value['unit']}": value["value"]}
    settings: dict[str, Any] = {}
    for name, inner in value.items():
        name = "class" if name == "_CLASS_" else str(name).lower().replace("-", "_")
        inner = str(inner).rpartition(".")[2] if name == "class" else inner
        settings |= _flat(inner, f"{path}.{name}".lstrip("."))
    return settings


def _completed(settings: dict[str, Any], place: Path) -> dict[str, Any]:
    """Settings with those that several of them, or files beside theirs, say together."""
    settings = with_scheduler_arguments(settings)
    folder = place.parent.name if place.suffix == ".py" else ""
    module = settings.get("module") or settings.get("model.name") or folder
    flavor = settings.get("model_spec.model_registry") or settings.get("model.flavor") or settings.get("config")
    if f"model_spec.{module}" in WORDS and flavor:
        settings[f"model_spec.{module}"] = str(flavor).lower().removeprefix(f"{module}_")
        settings.pop("model.flavor", None)
    policy = {name.rpartition(".")[2] for name in settings if name.startswith("activation_checkpoint.")}
    if "preserve_rng_state" in policy and "force_recompute_mm_shapes_by_fqns" not in policy:
        # torchtitan saves the fields of a policy without its name.
        settings["activation_checkpoint.mode"] = "budget" if "memory_budget" in policy else "full"
    overrides = "train_module.optim.group_overrides"
    if settings.get(f"{overrides}.opts.weight_decay") == 0 and settings.get(f"{overrides}.count", 1) == 1:
        settings["train_module.optim.no_decay"] = settings.get(f"{overrides}.params")
    parts, batch = settings.get("num_microbatches"), settings.get("train_batch_size")
    if isinstance(parts, int) and isinstance(batch, int) and 0 < parts <= batch and not batch % parts:
        # The batch of a replica, of which a pipeline computes these parts.
        settings = {"micro_batch_size": batch // parts, **settings}
    is_trainers = "global_step" in settings or "per_device_train_batch_size" in settings
    if is_trainers and place.suffix == ".json" and (place.parent / "config.json").is_file():
        settings.setdefault("config_folder", str(place.parent))
    return settings
