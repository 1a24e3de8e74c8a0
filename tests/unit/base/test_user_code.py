"""Objects of the user's own: what a configuration records of them, and what their errors say."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise.base.errors import error_text
from shardwise.base.user_code import object_name


class Mine:
    def hear(self, event: object) -> None: ...

    def __call__(self, event: object) -> None: ...


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Mine(), f"{__name__}:Mine"),
        (Mine().hear, f"{__name__}:Mine_hear"),
        (lambda event: None, f"{__name__}:_lambda_"),
        ([].append, "builtins:list_append"),
        (print, "builtins:print"),
        (torch.zeros(1).add, "torch:Tensor_add"),
        (functools.partial(print), "functools:partial"),
    ],
    ids=["object", "method", "lambda", "list's", "builtin", "tensor's", "partial"],
)
def test_what_is_recorded_of_an_object(value: object, name: str) -> None:
    assert object_name(value) == name


def reads_json() -> None:
    json.loads("{")


def adds_shapes() -> None:
    torch.zeros(2) + torch.zeros(3)


def calls_by_the_library() -> None:
    functools.reduce(lambda a, b: a / 0, [1, 2])


def says_nothing() -> None:
    raise NotImplementedError


@pytest.mark.parametrize("function", [reads_json, adds_shapes, calls_by_the_library, says_nothing])
def test_an_error_names_the_line_of_ones_own_code(function: Callable[[], Any]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    own = function.__code__.co_firstlineno + 1
    assert error_text(caught.value).endswith(f" ({__file__}, line {own})")
    # Without a line, as one that has no text.
    assert error_text(NotImplementedError()) == "NotImplementedError"
    assert error_text(OSError("no room")) == "OSError: no room"
