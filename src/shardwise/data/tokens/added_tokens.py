"""The tokens that files beside a tokenizer add to it: those that transformers adds, in the same order.

`tokenizer_config.json` gives tokens by their ids (`added_tokens_decoder`); older folders have `added_tokens.json`.
Special tokens are named in `tokenizer_config.json` and, in older folders, in `special_tokens_map.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

BY_ID = "added_tokens_decoder"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE, _MORE_BEFORE = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class SpecialTokens:
    """The special tokens that two files name.

    Args:
        config: the content of `tokenizer_config.json`.
        older: that of `special_tokens_map.json`, which goes first, but is ignored beside an `added_tokens_decoder`.
    """

    def __init__(self, config: Mapping[str, Any], older: Mapping[str, Any]) -> None:
        older = {} if BY_ID in config else older
        self._values = {**config, **older}
        more = config.get(_MORE) or config.get(_MORE_BEFORE) or older.get(_MORE) or older.get(_MORE_BEFORE) or []
        self._more_roles, self._more = (more, []) if isinstance(more, dict) else ({}, more)

    def named(self, role: str) -> str | None:
        """The token of a role, such as `eos_token`."""
        return content_of(self._values.get(role))

    def all(self) -> list[tokenizers.AddedToken]:
        """All of them; TypeError where the files do not describe them."""
        more_roles = [key for key in self._values if key.endswith("_token") and key not in _ROLES]
        values = [self._values.get(role) for role in (*_ROLES, *more_roles)]
        values += [*self._more_roles.values(), *self._more]
        return [added_token(value, special=True) for value in values if content_of(value) is not None]


def added_token(value: Any, **flags: bool) -> tokenizers.AddedToken:
    """The token that a file gives, with these flags; TypeError where it gives none."""
    import tokenizers

    if (content := content_of(value)) is None:
        raise TypeError(f"{value!r} is no token")
    own = {flag: value[flag] for flag in _FLAGS if flag in value} if isinstance(value, dict) else {}
    return tokenizers.AddedToken(content, **{**own, **flags})


def content_of(value: object) -> str | None:
    """The text of a token, which files give as text or with its flags; None where the value is no token."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None
