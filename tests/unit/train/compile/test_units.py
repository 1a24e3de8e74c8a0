"""Which models have units to compile. That they compute the same: tests/dist/test_compile.py."""

import pytest
import torch
from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.config import load_config
from shardwise.train.compile.units import compile_units


def test_a_model_without_blocks_is_refused() -> None:
    settings = load_config("llama2-tiny", ["compile.enabled=true", "compile.backend=aot_eager"]).compile
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(
        ConfigError, match=r"needs a model with blocks, and model\.family has none: put its blocks into"
    ):
        compile_units(model, settings, torch.device("cpu"))
