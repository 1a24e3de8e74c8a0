"""Plans: the time of a step on a device, the search for the fastest layouts, and calibration (docs/planner.md)."""
