"""The shipped recipes, as commented YAML."""
