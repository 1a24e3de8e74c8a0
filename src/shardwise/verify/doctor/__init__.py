"""What `shardwise doctor` examines: this machine, its software, and what a run needs of them."""
