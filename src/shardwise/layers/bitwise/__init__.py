"""Layers whose sums are made of parts of fixed shape, which no layout changes by a bit (docs/bitwise.md)."""
