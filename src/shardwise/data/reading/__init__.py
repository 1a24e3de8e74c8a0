"""The files that data lie in: which format they have, and what they hold."""
