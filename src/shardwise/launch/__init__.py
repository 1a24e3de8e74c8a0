"""Launchers: local ranks and their processes, the first failure of a job, and stop requests.

`shardwise_jobs` starts ranks by SLURM.

    shardwise train …   validates, then `local.launch`, or `node.launch_on_node` in a job of SLURM
      └─ agent          imports torch once, then forks the ranks; in a session of its own, no terminal output
           ├─ rank 0    keeps the terminal
           └─ rank N    writes to logs/rank-000N.log

    local           starts the agent, waits for the ranks, and has each child end with its parent
    rank_process    a rank from joining its job to its exit code
    first_failure   the one file that keeps the cause of a job's end
    stop_requests   signals and stop.json, which ask for a stop with a checkpoint
    heartbeat       the doings of each rank, by which the missing one of a job that hangs is named
    external_launchers  ranks that `srun` or `mpirun` started one by one
    environment     the variables between a launcher and its ranks

Only `agent`, which runs in a process of its own, imports torch.
"""
