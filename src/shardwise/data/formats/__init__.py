"""What commands do with data of each format: a module for each, which opens, glances at and inspects them."""
