"""Compilation ahead of a training, on one machine that plays every role of its ranks."""
