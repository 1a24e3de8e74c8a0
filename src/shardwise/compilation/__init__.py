"""Compiled training: which parts of a model `torch.compile` compiles, and how their graphs are kept."""

from shardwise.compilation.keeper import Keeper
from shardwise.compilation.units import Compilation, compile_units

__all__ = ["Compilation", "Keeper", "compile_units"]
