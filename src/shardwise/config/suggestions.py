"""The key or option that a wrong name most likely stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import SequenceMatcher

from shardwise.base.errors import nearest_name
from shardwise.config.other_names import OTHER_NAMES, OTHER_VALUES, OWN_MEANING, SECTIONS, WITHOUT_KEY

_NEAR = 0.65
"""Least similarity of names in one section, and of options."""
_VERY_NEAR = 0.8
"""Least similarity of names anywhere."""
_NO = ("false", "no", "off", "0")


def plain_name(name: str) -> str:
    """A key or an option in lower case, with underscores and without leading dashes."""
    return name.strip().lstrip("-").lower().replace("-", "_")


def _with_leaf(name: str) -> list[str]:
    """A name, and its part after the last dot where that has the same meaning in each section."""
    leaf = name.rpartition(".")[2]
    return [name] if leaf in OWN_MEANING else [name, leaf]


def reason_without_key(name: str) -> str | None:
    """The reason why no key or option sets what `name` says; None for other names."""
    return next((WITHOUT_KEY[known] for known in _with_leaf(plain_name(name)) if known in WITHOUT_KEY), None)


def suggestions(
    name: str, keys: Collection[str], options: Collection[str] | None = None, value: object = None
) -> list[str]:
    """The possible meanings of `name`: keys, keys with their values or options; empty if nothing means the same.

    The order is: another spelling of a name, a name of another library, the most similar name of any section.

    Args:
        name: a key that is unknown, or an unknown option with its dashes.
        keys: the keys that are valid, with their sections.
        options: options that are valid, such as `--nproc`; None: those in `OTHER_NAMES`, whatever the command has.
        value: the value that was given with it.
    """
    plain = plain_name(name)
    section, _, leaf = plain.rpartition(".")
    section = SECTIONS.get(section, section)
    plain_options = {plain_name(option): option for option in options or ()}
    if leaf in plain_options and (not section or leaf not in OTHER_NAMES):
        return [plain_options[leaf]]
    if f"{section}.{leaf}".lstrip(".") in keys:
        return [f"{section}.{leaf}".lstrip(".")]
    targets = next((OTHER_NAMES[known] for known in _with_leaf(plain) if known in OTHER_NAMES), ())
    valid = [target for target in targets if _is_valid(target, keys, options)]
    if not valid and (near := _most_similar(section, leaf, keys, plain_options, options)):
        valid = [near]
    if str(value).lower() not in _NO:
        return valid
    # A target with a value switches on what the user switches off.
    return [target.replace("=true", "=false") for target in valid if "=" not in target or target.endswith("=true")]


def _is_valid(target: str, keys: Collection[str], options: Collection[str] | None) -> bool:
    if target.startswith("--"):
        return options is None or target in options
    return target.partition("=")[0] in keys


def _most_similar(
    section: str, leaf: str, keys: Iterable[str], plain_options: dict[str, str], options: Collection[str] | None
) -> str | None:
    """The most similar of all names; one of the same section may be less similar than others."""
    keys = list(keys)
    candidates = [*plain_options.items()]
    for key in keys:
        section_of_key, _, leaf_of_key = key.rpartition(".")
        if section_of_key == section or leaf_of_key not in OWN_MEANING:
            candidates.append((leaf_of_key, key))
    for name, targets in OTHER_NAMES.items():
        if "." not in name and name not in OTHER_VALUES:
            candidates += [(name, target) for target in targets if _is_valid(target, keys, options)]
    best = None
    best_score = 0.0
    for known, target in candidates:
        is_near = target.rpartition(".")[0] == section if section else target in plain_options.values()
        if section and leaf in OWN_MEANING and not is_near:
            continue
        score = SequenceMatcher(None, leaf, known).ratio()
        # A slip within a section is likelier than a name of another one.
        rank = score + 0.05 * is_near
        if score >= (_NEAR if is_near and known not in OTHER_NAMES else _VERY_NEAR) and rank > best_score:
            best = target
            best_score = rank
    return best


def section_suggestion(name: str, sections: Collection[str]) -> str | None:
    """The section that a wrong name most likely stands for; None if none is similar."""
    plain = plain_name(name)
    return SECTIONS.get(plain) or nearest_name(plain, sections, cutoff=0.75)
