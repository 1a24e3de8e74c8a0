"""Proof that a recipe trains alike at every layout: its model in miniature, each layout against one process."""
