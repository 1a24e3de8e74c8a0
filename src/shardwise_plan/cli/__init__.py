"""Commands, each a module with `configure(parser)` and `run(arguments)`."""
