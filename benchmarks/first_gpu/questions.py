"""The questions in order of value, each a module of this folder, with the seconds that it needs on an H100."""

QUESTIONS = {
    "environment": 8,
    "correctness": 240,
    "side_by_side": 120,
    "fp8": 45,
    "experts": 15,
    "documents": 60,
    "tensor_parallel": 15,
    "profile": 35,
    "switches": 75,
    "training": 110,
    "block": 35,
    "accumulation": 8,
    "update": 20,
    "attention": 25,
    "matmul": 35,
    "memory": 20,
}
