"""`python -m shardwise`, the same as the command `shardwise`."""

import sys

from shardwise.cli import main

sys.exit(main())
