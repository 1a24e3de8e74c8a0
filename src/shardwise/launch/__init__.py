"""Starting local ranks, ending them together, and telling the user which one failed. Nothing here imports torch
but `agent`, which runs in a process of its own.

    shardwise train …   validates, then `local.launch`
      └─ agent          torchrun's elastic agent, in a session of its own; no terminal output
           ├─ rank 0    keeps the terminal
           └─ rank N    writes to logs/rank-000N.log

Each child dies with its parent (`guard`); the first failure of a run is one file (`failure`).
"""
