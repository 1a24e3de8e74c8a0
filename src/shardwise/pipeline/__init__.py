"""Pipeline parallelism: the order of each schedule's actions, stages, and torch's schedules that run them."""
