"""What a trained model is used for: texts, chats, scores on tasks, and checkpoints made of other programs' models."""
