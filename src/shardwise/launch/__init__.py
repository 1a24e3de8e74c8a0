"""Starting local ranks, running their work, ending them together, and showing the user which one failed. Nothing here
imports torch but `agent`, which runs in a process of its own.

    shardwise train …   validates, then `local.launch`
      └─ agent          torchrun's elastic agent, in a session of its own; no terminal output
           ├─ rank 0    keeps the terminal
           └─ rank N    writes to logs/rank-000N.log

Each child ends with its parent (`guard`). What ends the work of a rank becomes a text and an exit code (`rank`). The
first failure of a job is one file (`failure`).
"""
