"""The report of a run: one HTML file, pictures, or JSON."""
