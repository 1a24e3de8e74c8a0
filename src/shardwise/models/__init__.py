"""The model families, each in one short file that reads like the architecture, with parameter counts and names."""
