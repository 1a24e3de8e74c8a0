"""What every room uses: errors, files, units, names, reading of YAML and JSON, and what this machine has. No torch."""
