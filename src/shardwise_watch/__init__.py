"""Readers of a run's folder: `ls`, `top`, `monitor`, `report` and `compare`."""
