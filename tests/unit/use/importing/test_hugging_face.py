"""Hugging Face folders as checkpoints of step 0."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.storage.root import Root
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise_use.importing.hugging_face import open_hugging_face
from tests.hugging_face import CASES, make, save
from tests.unit.use.importing.checks import assert_equal, assert_same_model, problems, weights, write


@pytest.mark.parametrize("case", CASES)
def test_every_family(tmp_path: Path, case: str) -> None:
    model = save(case, tmp_path / "saved")
    assert_same_model(open_hugging_face(Root.of(tmp_path / "saved")), model, tmp_path)


def test_other_spellings_and_tied_copies(tmp_path: Path) -> None:
    save("gpt", tmp_path / "saved")
    file = tmp_path / "saved/model.safetensors"
    held = load_file(file)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in held.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "lm_head.weight": bare["wte.weight"].clone()}, file)
    found = weights(write(open_hugging_face(Root.of(tmp_path / "saved")), tmp_path / "ours"))
    assert_equal(found, held)
    save_file(bare | {"lm_head.weight": bare["wte.weight"] + 1}, file)
    with pytest.raises(ConfigError, match=r"lm_head.weight must equal wte.weight: the model has one weight for both"):
        open_hugging_face(Root.of(tmp_path / "saved"))


def test_shards_dtype_and_files_beside(tmp_path: Path) -> None:
    model = make("llama", bos_token_id=3, eos_token_id=4).bfloat16()
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    train_tokenizer(["some text " * 9], 257, "text").save(tmp_path / "saved")
    (tmp_path / "saved/README.md").write_text("not of the model")
    opened = open_hugging_face(Root.of(tmp_path / "saved"))
    folder = write(opened, tmp_path / "ours", max_shard_bytes=20_000)
    found = weights(folder)
    assert_equal(found, weights(tmp_path / "saved"))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    described = json.loads((folder / "config.json").read_text())
    assert (described["torch_dtype"], described["bos_token_id"], described["eos_token_id"]) == ("bfloat16", 3, 4)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
    assert not (folder / "README.md").exists()
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def test_weights_that_do_not_fit_or_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    save("gpt", tmp_path / "saved")
    file = tmp_path / "saved/model.safetensors"
    held = load_file(file)
    damaged = {name: tensor.clone() for name, tensor in held.items()}
    damaged["transformer.ln_f.bias"][:3] = torch.nan
    damaged["transformer.wte.weight"][-1, 0] = -torch.inf
    save_file(damaged, file)
    with pytest.raises(ConfigError, match=r"SOURCE must have finite weights, and it has values that are .*") as caught:
        write(open_hugging_face(Root.of(tmp_path / "saved")), tmp_path / "ours")
    for tensor in ("transformer.ln_f.bias (3)", "transformer.wte.weight (1)"):
        assert tensor in str(caught.value)
    assert not list((tmp_path / "ours").iterdir()), "nothing is left of it"
    del held["transformer.h.0.ln_1.bias"]
    held["transformer.extra"] = torch.ones(2)
    held["transformer.wpe.weight"] = torch.ones(3, 32)
    held["transformer.ln_f.bias"] = held["transformer.ln_f.bias"].to(torch.int8)
    save_file(held, file)
    assert problems(open_hugging_face, Root.of(tmp_path / "saved"), FOLDER=tmp_path / "saved") == [
        "FOLDER lacks transformer.h.0.ln_1.bias [32]",
        "FOLDER has transformer.extra [2], which the model lacks",
        "FOLDER: shape of transformer.wpe.weight [3, 32] must be [24, 32]",
        "FOLDER: dtype of transformer.ln_f.bias (I8) must be float64, float32, float16 or bfloat16: quantized weights "
        "cannot be trained",
    ]
