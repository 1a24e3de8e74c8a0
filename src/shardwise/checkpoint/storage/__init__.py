"""Bytes at a place, on a disk or in an object store: reading, writing, fetching, checksums by chunk."""
