"""The questions in order of value, each a module of this folder, with the seconds that it needs on an H100."""

QUESTIONS = {
    "environment": 8,
    "training": 150,
    "profile": 35,
    "block": 35,
    "accumulation": 8,
    "update": 20,
    "attention": 25,
    "documents": 60,
    "matmul": 35,
    "memory": 20,
    "tensor_parallel": 10,
}
