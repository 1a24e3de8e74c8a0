"""The state of a model and its optimizer: saved, restored, exported, and imported from other programs."""
