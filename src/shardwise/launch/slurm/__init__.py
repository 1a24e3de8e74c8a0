"""Jobs on a cluster: what is submitted to SLURM, how its attempts are supervised, and how it is doing.

    shardwise submit …    submission.py: checks; script.py: the job's script; slurm.py: sbatch
      └─ the script       on the job's first node: `python -m shardwise.cli.supervise` (supervisor.py)
           └─ srun        on each node a launcher of its ranks: `shardwise train` (launch/node.py)

Nothing here imports torch.
"""
