"""Which layouts of a recipe fit a cluster, and how long each takes; without torch."""

from shardwise.planner.candidates import FIXABLE
from shardwise.planner.search import Plan, Search, search

__all__ = ["FIXABLE", "Plan", "Search", "search"]
