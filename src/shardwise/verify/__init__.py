"""Proofs and measurements: layouts against one process, the machine, and a device file."""
