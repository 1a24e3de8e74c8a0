"""Ranks and what they share: the mesh and its groups, collectives, placements of parameters, devices."""
