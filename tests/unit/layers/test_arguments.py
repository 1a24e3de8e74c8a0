"""Arguments that a layer does not take are refused."""

import pytest

from shardwise.base.errors import ArgumentError, ConfigError
from shardwise.config.other_names import ARGUMENTS
from shardwise.layers.arguments import refuse_unknown


class Layer:
    def __init__(self, group: object = None) -> None: ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["groupe"], "Layer does not take groupe (did you mean group?)"),
        (["pin", "groups", "seed"], "Layer does not take pin (leave it out) or groups (give group=)"),
        (["pin", "zzz"], "Layer does not take pin (leave it out) or zzz; it takes group and seed"),
    ],
)
def test_unknown_arguments_are_one_sentence(given: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARGUMENTS, "layers", {"pin": "leave it out", "groups": "give group="})
    with pytest.raises(ArgumentError) as raised:
        refuse_unknown(Layer, dict.fromkeys(given), ["seed"])
    assert str(raised.value) == message
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, ConfigError)
