"""A run's folder, and its readers: `top`, `monitor`, `ls` and `report`. Nothing here imports torch."""
