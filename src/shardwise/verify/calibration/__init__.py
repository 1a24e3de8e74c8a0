"""A device file for this machine: what its ranks measure, and the constants that explain it."""
