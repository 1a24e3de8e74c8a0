"""The Python API beside the layers: recipes, runs, checkpoints (`recipes`, `runs`, `checkpoints`).

`shardwise/__init__.py` lists the public names, and each is imported from there: `shardwise.load_recipe`.
"""
