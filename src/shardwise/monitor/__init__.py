"""Watching a run: what its folder tells, as `top`, `monitor`, `ls` and `report` show it. Never imports torch."""
