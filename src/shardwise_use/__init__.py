"""Uses of a trained model: texts, chats, scores on tasks, and checkpoints made of other programs' models."""
