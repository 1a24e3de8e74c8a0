"""Jobs on a cluster of SLURM: their submission, the supervision of their attempts, and their state.

The way of a job, in order:

    1. `shardwise submit …` on a login node
         submission.py   checks layout, memory, folder and time limit, and says what will be submitted
         script.py       writes the job's script with its #SBATCH lines
         slurm_commands.py  gives the script to sbatch, and asks SLURM everything else
    2. the job's script on the first node of the job, whenever SLURM starts it
         supervisor.py   `shardwise supervise`: makes attempts until the training has ended, or cannot
         attempt.py      one attempt: `srun` starts a launcher on each node, which is watched to its end
    3. `shardwise train …` on each node
         launch/node.py  the node's launcher: tells the supervisor over TCP how its ranks do
         launch/local.py starts torchrun's agent, which starts the ranks
    4. the end of an attempt
         restarts.py     decides about the next attempt: in the same allocation, after a requeue by SLURM, or none

    jobs.py              the state of submitted jobs for `shardwise jobs`, and the end of those that wait

Nothing here imports torch.
"""
