"""Memory and communication of a run, and the peak speeds of devices, computed without torch.

A run is refused by these, and its summary shows them. `shardwise_plan` searches layouts with them.
"""
