"""Has one program read the models that `draw.py` made: `python read.py NAME FOLDER`.

It needs the program and numpy alone, as the programs exclude each other. Each model is read in a process of its own: a
program may abort. What it computes goes into CASE/NAME.json: the largest difference of a log-probability, or the error.
"""

import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("LLAMA_CPP", "")  # folder of llama.cpp's sources, which has its converter
PATIENCE_SECONDS = 120


def log_softmax(logits: Any) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def transformers(folder: Path, ids: list[int]) -> np.ndarray:
    import torch
    import transformers

    config = json.loads((folder / "model/config.json").read_text())
    auto = transformers.AutoModelForPreTraining if config["model_type"] == "bert" else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder / "model", torch_dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(torch.tensor([ids]))
    return log_softmax((out.logits if hasattr(out, "logits") else out.prediction_logits)[0].numpy())


def gguf(folder: Path, ids: list[int], file: str = "model.gguf") -> np.ndarray:
    case = json.loads((folder / "case.json").read_text())
    if file == "model.gguf" and "gguf" in case:
        raise ValueError(case["gguf"])
    import llama_cpp

    kinds = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(
        str(folder / file), n_ctx=64, n_batch=64, n_threads=1, logits_all=True, verbose=True, use_mmap=False, **kinds
    )
    model.eval(ids)
    return log_softmax(np.array(model.scores[: len(ids)]))


def llama_cpp(folder: Path, ids: list[int]) -> np.ndarray:
    """By llama.cpp's own converter, with the name of our tokenizer's rule, as it knows tokenizers by a hash."""
    sys.path[:0] = [os.environ["LLAMA_CPP"], os.environ["LLAMA_CPP"] + "/gguf-py"]
    from conversion import base

    base.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    import convert_hf_to_gguf

    sys.argv = ["convert", str(folder / "model"), "--outfile", str(folder / "own.gguf"), "--outtype", "f32"]
    convert_hf_to_gguf.main()
    return gguf(folder, ids, "own.gguf")


def mlx_lm(folder: Path, ids: list[int]) -> np.ndarray:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(folder / "model")
    return log_softmax(np.array(model(mx.array([ids]))[0].astype(mx.float32)))


def ctranslate2(folder: Path, ids: list[int]) -> np.ndarray:
    import ctranslate2
    import transformers

    ctranslate2.converters.TransformersConverter(str(folder / "model")).convert(str(folder / "ct2"), force=True)
    generator = ctranslate2.Generator(str(folder / "ct2"), compute_type="float32")
    tokens = transformers.AutoTokenizer.from_pretrained(folder / "model").convert_ids_to_tokens(ids)
    return log_softmax(np.array(generator.forward_batch([tokens]))[0])


def vllm(folder: Path, ids: list[int]) -> np.ndarray:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    model = vllm.LLM(str(folder / "model"), dtype="float32", enforce_eager=True, max_model_len=64, max_logprobs=384)
    options = vllm.SamplingParams(max_tokens=1, prompt_logprobs=384)
    rows = model.generate({"prompt_token_ids": ids}, options)[0].prompt_logprobs
    return np.array([[row[token].logprob for token in range(384)] for row in rows[1:]])


READERS = {
    "transformers": (transformers, "transformers"),
    "transformers-4": (transformers, "transformers"),
    "gguf": (gguf, "llama-cpp-python"),
    "llama.cpp": (llama_cpp, "llama-cpp-python"),
    "mlx-lm": (mlx_lm, "mlx-lm"),
    "ctranslate2": (ctranslate2, "ctranslate2"),
    "vllm": (vllm, "vllm-cpu"),
}
"""Name → function, and the package whose version counts."""


IMPORTED_ONCE = {
    "vllm": ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"),
    "mlx-lm": ("mlx_lm.utils",),
    **dict.fromkeys(
        ("transformers", "transformers-4", "llama.cpp", "ctranslate2"), ("torch", "transformers.models.auto")
    ),
}
"""Libraries that the processes inherit, as their import takes seconds."""


def reason(error: BaseException, log: Path) -> str:
    """The first lines of an error, or what llama.cpp logged, cut short."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines[:3])}"
    logged = log.read_text(errors="replace") if log.exists() else ""
    if told := [line for line in logged.splitlines() if "error loading model: " in line]:
        text = told[-1].partition("error loading model: ")[2]
    return text if len(text) <= 160 else f"{text[:157]}…"


def read(name: str, folder: Path, result: Any) -> None:
    if not os.environ.get("LOUD"):
        os.dup2(os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
        os.dup2(1, 2)
    ids = json.loads((folder / "case.json").read_text())["ids"]
    try:
        found = READERS[name][0](folder, ids)
        expected = np.load(folder / "expected.npy")
        # A program that gives a row for the tokens after the first only starts with the first prediction.
        by = float(np.abs(found - expected[: len(found)]).max())
        says = {"by": by if np.isfinite(by) else 1e9}
    except (Exception, SystemExit) as error:  # noqa: BLE001, whatever the program raises is its answer
        traceback.print_exc()
        says = {"says": reason(error, folder / f"{name}.log")}
    result.send(says)


def main(name: str, folder: Path) -> None:
    package = READERS[name][1]
    version = importlib.metadata.version(package)
    own = multiprocessing.get_context("fork")
    for module in IMPORTED_ONCE.get(name, ()):
        importlib.import_module(module)
    # Families with their default values first; what was read before is kept.
    cases = sorted(
        folder.glob("[0-9]*/case.json"), key=lambda case: (bool(json.loads(case.read_text())["lines"]), case)
    )
    for case in cases:
        if (case.parent / f"{name}.json").exists():
            continue
        receiver, sender = own.Pipe(duplex=False)
        process = own.Process(target=read, args=(name, case.parent, sender))
        process.start()
        sender.close()
        says: dict[str, Any] = {}
        if receiver.poll(PATIENCE_SECONDS):
            with contextlib.suppress(EOFError):
                says = receiver.recv()
        process.join(5)
        if process.is_alive():
            process.kill()
        if not says:
            says = {"says": f"the process ended with {process.exitcode}"}
        described = json.loads(case.read_text())
        print(case.parent.name, described["name"], described["lines"], says, flush=True)
        (case.parent / f"{name}.json").write_text(json.dumps({"version": version, **says}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
