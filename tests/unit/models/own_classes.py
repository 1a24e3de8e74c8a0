"""Classes of a user's own as text, and what they are checked and built by."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.config import Config, config_from_sections
from shardwise.distributed.mesh import Group
from shardwise.models.build import build_model
from shardwise.models.user_model import check_user_model

HEAD = """
import torch
from torch import nn
import shardwise as sw

class Model(nn.Module):
"""
FORWARD = """
    def forward(self, ids, targets):
        return self.layer(ids.float()).sum()
"""
PLAIN = """
    def __init__(self, vocab_size, width=4):
        super().__init__()
        self.layer = nn.Linear(3, width)
"""
Write = Callable[..., str]


def config(family: str, sections: dict[str, dict[str, Any]] | None = None, **keys: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"family": family, "vocab_size": 16, **keys},
        "train": {"steps": 1, "global_batch": 4, "sequence_length": 4},
        "optimizer": {"lr": 1e-3},
    }
    for section, values in (sections or {}).items():
        base[section] = base.get(section, {}) | values
    return config_from_sections(base)


def problems(chosen: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_user_model(chosen)
    return caught.value.problems


def problem(chosen: Config) -> str:
    (text,) = problems(chosen)
    return text


def build(chosen: Config, group: Group | None = None, **options: Any) -> nn.Module:
    return build_model(chosen, group or Group(), sequence_parallel=False, **options)


def unbuildable(chosen: Config, group: Group | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        build(chosen, group)
    (text,) = caught.value.problems
    return text
