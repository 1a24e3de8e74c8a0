"""The screen of `shardwise top`. Of its modules only `app` imports Textual: `--once` prints a frame without it."""
