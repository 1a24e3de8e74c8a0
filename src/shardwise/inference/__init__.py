"""Evaluation of a trained model on a text, and generation from a prompt; the results are the same at any layout."""

from shardwise.inference.evaluation import Evaluation, evaluate
from shardwise.inference.generation import Generator, generate
from shardwise.inference.jobs import Answer, Prompt, run_evaluation, run_generation
from shardwise.inference.sampling import Sampler
from shardwise.inference.text import Detokenizer

__all__ = [
    "Answer",
    "Detokenizer",
    "Evaluation",
    "Generator",
    "Prompt",
    "Sampler",
    "evaluate",
    "generate",
    "run_evaluation",
    "run_generation",
]
