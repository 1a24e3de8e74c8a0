"""Optimizers over sharded state, gradient norms, and learning-rate schedules."""
