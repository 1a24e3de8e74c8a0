"""What a Python program does with shardwise beside the layers: recipes, runs, plans and checkpoints.

`shardwise/__init__.py` lists the public names, and each is imported from there: `shardwise.load_recipe`.
"""
