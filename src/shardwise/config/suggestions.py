"""The key or option that a wrong name most likely stands for: a name of another program, or the nearest of ours."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from shardwise.base.errors import listing, nearest_name
from shardwise.config.other_names import (
    FACT_WORDS,
    FACTS,
    FAMILY_FACTS,
    NO,
    OTHER_NAMES,
    OTHER_VALUES,
    SECTIONS,
    WITHOUT_KEY,
)

_NEAR = 0.65  # least similarity of names in one section, and of options
_VERY_NEAR = 0.8  # least similarity of names anywhere
_OWN_MEANING = frozenset({
    "config", "data", "enabled", "every", "format", "keep", "load", "loss", "mode", "name", "nodes", "optimizer",
    "options", "path", "reduce", "resume", "schedule", "stages", "steps", "timeout",
})  # fmt: skip
"""Leaves of keys that have another meaning in another section: there they are no advice."""


def plain_name(name: str) -> str:
    """A key or an option in lower case, with underscores and without leading dashes."""
    return name.strip().lstrip("-").lower().replace("-", "_")


def known_name(name: str) -> str | None:
    """The name in the record of other programs' names that `name`, with or without its sections, stands for."""
    names = _with_leaf(plain_name(name))
    return next((known for known in names if known in OTHER_NAMES or known in WITHOUT_KEY or known in FACTS), None)


def _with_leaf(name: str) -> list[str]:
    leaf = name.rpartition(".")[2]
    return [name] if leaf in _OWN_MEANING else [name, leaf]


def reason_without_key(name: str, value: object = None) -> str | None:
    """The reason why no key or option sets what `name` says; None for other names."""
    known = known_name(name)
    if known in WITHOUT_KEY:
        return WITHOUT_KEY[known]
    if known not in FACTS:
        return None
    fact, _, told = FACTS[known].partition("=")
    told = told or str(FACT_WORDS.get(str(value).lower(), value)).lower()
    families = [family for family, facts in FAMILY_FACTS.items() if str(facts.get(fact)).lower() == told]
    return f"the family of the model says it, such as model.family={listing(families or FAMILY_FACTS, 'or')}"


def suggestions(
    name: str, keys: Collection[str], options: Collection[str] | None = None, value: object = None
) -> list[str]:
    """The possible meanings of `name`: keys, keys with their values or options; empty if nothing means the same.

    The order is: another spelling of a name, a name of another program, the most similar name.

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
    meant = next((OTHER_NAMES[known] for known in _with_leaf(plain) if known in OTHER_NAMES), ())
    valid = [target for target in meant if is_key_or_option(target, keys, options)]
    if not valid and (near := _most_similar(section, leaf, keys, plain_options, options)):
        valid = [near]
    if str(value).lower() not in NO:
        return valid
    # A target with a value switches on what the user switches off.
    return [target.replace("=true", "=false") for target in valid if "=" not in target or target.endswith("=true")]


def is_key_or_option(target: str, keys: Collection[str], options: Collection[str] | None) -> bool:
    """Return whether a suggestion from the record of other programs' names is a key or an option of a command."""
    if target.startswith("--"):
        return options is None or target in options
    # A Hugging Face file stands in place of a model's keys.
    return target.partition("=")[0] in keys or (target == "model.config" and "model.family" in keys)


def _most_similar(
    section: str, leaf: str, keys: Collection[str], plain_options: dict[str, str], options: Collection[str] | None
) -> str | None:
    """The most similar key or option; one of the same section may be less similar than others."""
    near = {} if section else {**plain_options}
    far = {**plain_options}
    for name, targets in OTHER_NAMES.items():
        valid = [target for target in targets if is_key_or_option(target, keys, options)]
        if valid and "." not in name and name not in OTHER_VALUES:
            far[name] = valid[0]
    for key in keys:
        section_of_key, _, leaf_of_key = key.rpartition(".")
        if section and section_of_key == section:
            near[leaf_of_key] = key
        elif leaf_of_key not in _OWN_MEANING:
            far[leaf_of_key] = key
    if matches := get_close_matches(leaf, near, n=1, cutoff=_NEAR):
        return near[matches[0]]
    if section and leaf in _OWN_MEANING:
        return None
    matches = get_close_matches(leaf, far, n=1, cutoff=_VERY_NEAR)
    return far[matches[0]] if matches else None


def section_suggestion(name: str, sections: Collection[str]) -> str | None:
    """The section that a wrong name most likely stands for; None if none is similar."""
    plain = plain_name(name)
    return SECTIONS.get(plain) or nearest_name(plain, sections, cutoff=0.76)


REMOVED = {
    "submit --kubernetes": "give each pod of Kubernetes the torchrun line of docs/cluster.md",
    "compile --retry-failed": "a graph that failed is compiled again, without an option",
}
"""Options as `COMMAND --option`, keys as `section.key`, values as `section.key=value` → one plain sentence."""


def removed_text(spelling: str) -> str | None:
    """The suggestion for an option, a key or a value that was removed: what to use instead; None for others."""
    sentence = REMOVED.get(spelling)
    return None if sentence is None else f"{spelling} was removed: {sentence}"
