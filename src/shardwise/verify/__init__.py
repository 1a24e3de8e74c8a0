"""Proofs and measurements: layouts against one process, the machine, a device file, and ranks for tests."""
