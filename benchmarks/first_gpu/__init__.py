"""What a GPU does with Llama 2 7B's work, in a few minutes of one device: `run.py` asks the questions in turn."""
