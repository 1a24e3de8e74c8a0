"""Memory, time and communication of a run, computed without torch, and the layouts that fit a cluster."""
