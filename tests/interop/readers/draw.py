"""Draws the small models that the readers are tried with: every family, and each key at another value.

`python -m tests.interop.readers.draw FOLDER`: a folder CASE for each, as `shardwise checkpoint export` writes it, with
a GGUF file where one can be written, the ids of a text, and the log-probabilities that transformers computes.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import yaml

from shardwise.base.errors import ShardwiseError
from shardwise.checkpoint.format.export_checkpoint import Export
from shardwise.checkpoint.storage.root import Root
from shardwise.config.hugging_face import to_hugging_face
from shardwise.config.model import FAMILIES
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise_use.gguf_file import GGUFExport
from shardwise_use.importing.hugging_face import open_hugging_face
from shardwise_use.importing.imported_model import write_imported_checkpoint
from shardwise_use.other_readers import PLAIN, model_lines

TOKENS = 48
MODELS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
SIZES, OWN, OTHER, TOGETHER = MODELS["sizes"], MODELS["own"], MODELS["other"], MODELS["together"]


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and `model` section of each case."""
    for family, record in FAMILIES.items():
        plain = {"family": family, **SIZES, **OWN.get(family, {})}
        if not record.gated:
            plain["intermediate_size"] = 4 * SIZES["hidden_size"]
            yield f"{family} intermediate_size", plain | {"intermediate_size": SIZES["intermediate_size"]}
        yield f"{family} {PLAIN}", plain
        if "head_dim" in record.model_fields and family != "olmoe":  # whose norms transformers makes as wide as x
            yield f"{family} head_dim", plain | {"head_dim": 64}
        for key, info in record.model_fields.items():
            if key.endswith(("_dropout", "_pdrop", "_dropout_prob")) or (key == "sliding_window" and key in plain):
                continue
            default = info.get_default(call_default_factory=True, validated_data={**SIZES, **plain})
            values = OTHER.get(key, [])
            default = plain.get(key, default)
            if isinstance(default, bool):
                values = [not default] if info.annotation is bool else []
            elif isinstance(default, str) and len(get_args(info.annotation)) > 1:
                values = [word for word in get_args(info.annotation) if word != default]
            for value in values:
                others = TOGETHER.get(value["rope_type"] if isinstance(value, dict) else key, {})
                yield f"{family} {key}", plain | others | {key: value}


def text_of_corpus() -> str:
    import shardwise

    file = Path(shardwise.__file__).parent / "data/corpus/tiny.jsonl"
    return "\n".join(json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines())


def draw(section: dict[str, Any], source: Path, tokenizer: Any) -> None:
    """Save a model of transformers with random weights, norms and biases too."""
    import transformers

    config = FAMILIES[section["family"]].model_validate(section)
    fields = to_hugging_face(config) | {"bos_token_id": None, "eos_token_id": tokenizer.end_of_document_id}
    described = transformers.AutoConfig.for_model(**json.loads(json.dumps(fields)))
    torch.manual_seed(1)
    model = getattr(transformers, fields["architectures"][0])(described).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and "norm" in name.lower() + ("norm" if ".ln_" in name else "")
            centre = 0.0 if not is_norm or name.endswith("bias") or config.norm_has_unit_offset else 1.0
            parameter.normal_(centre, 0.08 if parameter.dim() > 1 else 0.2)
    model.save_pretrained(source)
    tokenizer.save(source)


def main(folder: Path) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    text = text_of_corpus()
    tokenizer = train_tokenizer([text], SIZES["vocab_size"], "the corpus")
    ids = tokenizer.encode(text[2000:4000])[:TOKENS].tolist()
    for number, (name, section) in enumerate(cases()):
        place = folder / f"{number:03}"
        place.mkdir(parents=True)
        config = FAMILIES[section["family"]].model_validate(section)
        lines = list(model_lines(config))
        case = {"family": section["family"], "lines": lines, "ids": ids, "name": name}
        draw(section, place / "source", tokenizer)
        foreign = open_hugging_face(Root.of(place / "source"), ())
        checkpoint = write_imported_checkpoint(foreign, Root.of(place / "checkpoints")).folder
        Export(checkpoint, "float32").write(Root.of(place), "model")
        try:
            GGUFExport(checkpoint, "float32").write(place / "model.gguf")
        except ShardwiseError as error:
            case["gguf"] = str(error)
        auto = transformers.AutoModelForCausalLM if config.causal else transformers.AutoModelForPreTraining
        opened = auto.from_pretrained(place / "model", attn_implementation="eager").float().eval()
        with torch.no_grad():
            out = opened(torch.tensor([ids]))
        logits = out.logits if hasattr(out, "logits") else out.prediction_logits
        np.save(place / "expected.npy", torch.log_softmax(logits[0], -1).numpy())
        (place / "case.json").write_text(json.dumps(case), encoding="utf-8")
        print(number, name, lines, case.get("gguf", ""), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        main(Path(sys.argv[1]))
