"""The Python API beside the layers: recipes and plans, runs, checkpoints (`recipes_and_plans`, `runs`, `checkpoints`).

`shardwise/__init__.py` lists the public names, and each is imported from there: `shardwise.load_recipe`.
"""
