"""Training: from a configuration to a finished run directory (`run.run`)."""
