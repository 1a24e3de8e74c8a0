"""Files of other programs that set up a training: their settings, and a recipe made of them."""
