"""Helpers for tests of parallel code: real ranks on one machine, and the state of a model in canonical form."""
