"""`shardwise checkpoint export` and `import` as a user runs them: out of a training, and into one."""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.e2e.command import miniature, shardwise, within
from tests.hugging_face import open_folder
from tests.loopback_s3 import BUCKET, serve, user_of
from tests.stored import write_checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoint was written by two ranks, with float32 masters of bfloat16 weights."""
    at = tmp_path_factory.mktemp("trained")
    keys = ["parallel.tensor=2", "precision.mode=mixed", "train.eval_every=0", "log.sample_tokens=0"]
    shardwise("train", miniature(at), *keys, "--nproc", "2", "--run-dir", at / "run", at=at).succeeded()
    return at


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_run_is_exported(trained: Path) -> None:
    checkpoint = trained / "run/checkpoints/step-00000004"
    said = within("checkpoint", "export", "run", "plain", at=trained).succeeded().out
    assert "plain: step 4, 21 tensors in bfloat16; " in said
    stored, plain = weights(checkpoint), weights(trained / "plain")
    assert all(torch.equal(plain[name], tensor) for name, tensor in stored.items())
    assert not {"manifest.json", "optimizer"} & {path.name for path in (trained / "plain").iterdir()}
    for name in ("tokenizer.json", "generation_config.json", "README.md"):
        assert (trained / "plain" / name).read_bytes() == (checkpoint / name).read_bytes()
    assert "| steps | 4 of 4 |" in (checkpoint / "README.md").read_text(encoding="utf-8")
    assert "README.md" not in within("checkpoint", "verify", "run", at=trained).succeeded().out, "the manifest lists it"
    precise = within(
        "checkpoint", "export", checkpoint, "precise", "--dtype", "float32", "--max-shard-size", "20KB", at=trained
    ).succeeded()
    assert "21 tensors in float32, from the float32 masters; " in precise.out
    masters = weights(trained / "precise")
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert all(torch.equal(tensor.bfloat16(), stored[name]) for name, tensor in masters.items())
    assert any(not torch.equal(tensor, stored[name].float()) for name, tensor in masters.items())
    assert len(list((trained / "precise").glob("model-*.safetensors"))) > 1
    open_folder(trained / "precise")


def test_transformers_continues_an_export_as_generate_does(trained: Path) -> None:
    """In float32 and greedily, with the ids that end a text from generation_config.json."""
    folder = trained / "to-generate"
    within("checkpoint", "export", "run", folder, "--dtype", "float32", at=trained).succeeded()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (end,) = tokenizer("<|endoftext|>").input_ids
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == end
    assert model.generation_config.eos_token_id == end
    for prompt in ("In spring", "The river"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        found = model.generate(ids, max_new_tokens=12, do_sample=False)
        asked = ("--prompt", prompt, "--max-tokens", "12", "--temperature", "0")
        done = shardwise("generate", folder, *asked, at=trained)
        assert done.code == 0, done.err
        assert done.out.rstrip("\n") == tokenizer.decode(found[0], skip_special_tokens=True).rstrip("\n")


def test_an_export_tells_of_dropout_that_transformers_lacks(tmp_path: Path) -> None:
    for name, fields, told in (("dropped", {"ffn_dropout": 0.2}, True), ("plain", {"ffn_dropout": 0.0}, False)):
        folder = write_checkpoint(tmp_path / name, fields=fields)
        said = within("checkpoint", "export", folder.local(), tmp_path / f"{name}-out", at=tmp_path).succeeded().out
        assert ("config.json keeps ffn_dropout (0.2), which shardwise reads and transformers ignores" in said) == told
        assert json.loads((tmp_path / f"{name}-out/config.json").read_text())["ffn_dropout"] == fields["ffn_dropout"]


def test_an_import_is_a_checkpoint_like_any_other(trained: Path, tmp_path: Path) -> None:
    """Imported, inspected, verified, compared, trained from and evaluated."""
    within("checkpoint", "export", trained / "run", "plain", at=tmp_path).succeeded()
    said = within("checkpoint", "import", "plain", "imported", at=tmp_path).succeeded().out
    assert "imported/step-00000000: llama, " in said
    folder = tmp_path / "imported/step-00000000"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["optimizer"], manifest["config"]["model"]["family"]) == (0, None, "llama")
    assert "step        0" in within("checkpoint", "inspect", folder, at=tmp_path).succeeded().out
    assert ": intact; " in within("checkpoint", "verify", folder, at=tmp_path).succeeded().out
    within("checkpoint", "diff", folder, "plain", at=tmp_path).succeeded()
    losses = [
        json.loads(within("evaluate", each, "data.dataset=tiny", "--json", at=tmp_path).succeeded().out)["loss"]
        for each in ("plain", folder)
    ]
    assert losses[0] == losses[1]
    keys = ["checkpoint.load=imported", "train.steps=1", "train.eval_every=0", "log.sample_tokens=0"]
    begun = shardwise("train", miniature(tmp_path), *keys, "--run-dir", "next", at=tmp_path).succeeded()
    assert "weights: those of imported/step-00000000" in begun.out, "the folder that import wrote, as evaluate takes it"
    again = within("checkpoint", "import", "plain", "imported", at=tmp_path).failed(2)
    assert "step-00000000 exists already" in again
    (tmp_path / "imported").rename(tmp_path / "moved")
    more = ["train", "--run-dir", "next", "train.steps=2"]
    assert "# continues      next after step 1, from" in within(*more, "--dry-run", at=tmp_path).succeeded().out
    assert "resumed after step 1 from next/" in shardwise(*more, at=tmp_path).succeeded().out, "it has its own weights"
    shardwise("branch", "next", "train.steps=3", at=tmp_path).succeeded()


@pytest.mark.slow
def test_an_object_store_is_a_place_like_any_other(trained: Path, tmp_path: Path) -> None:
    with serve() as address:
        there, user = f"s3://{BUCKET}/models", user_of(address)
        shardwise("checkpoint", "export", trained / "run", f"{there}/plain", at=tmp_path, **user).succeeded()
        shardwise("checkpoint", "import", f"{there}/plain", f"{there}/imported", at=tmp_path, **user).succeeded()
        folder = f"{there}/imported/step-00000000"
        assert ": intact; " in shardwise("checkpoint", "verify", folder, at=tmp_path, **user).succeeded().out
        cut = ("data.dataset=tiny", "parallel.tensor=2", "--json")
        found = json.loads(shardwise("evaluate", f"{there}/imported", *cut, at=tmp_path, **user).succeeded().out)
        assert found["model"] == folder
        assert found["loss"] > 0
        shardwise("checkpoint", "export", folder, "back", at=tmp_path, **user).succeeded()
        said = within("checkpoint", "export", folder, f"{there}/plain", at=tmp_path, **user).failed(2)
    assert "s3://bucket/models/plain exists already" in said
    found, wanted = weights(tmp_path / "back"), weights(trained / "run/checkpoints/step-00000004")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


class Touch:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shards/mp_rank_00").mkdir(parents=True)
    torch.save({"model": {}, "args": Touch()}, tmp_path / "shards/mp_rank_00/model_optim_rng.pt")
    said = within("checkpoint", "import", "--from", "megatron", "shards", "ours", at=tmp_path).failed(2)
    assert said.count("\n") == 1
    assert "is refused: beside tensors and plain values its pickle names posix.system" in said
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_imports_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, text in (
        (["nowhere", "ours"], "SOURCE (nowhere)"),
        (["empty", "ours", "--config", "x"], "--config (x) must be left out with --from hugging-face"),
    ):
        said = within("checkpoint", "import", *arguments, at=tmp_path, HF_HUB_OFFLINE="1").failed(2)
        assert text in said
        assert "checkpoint.load" not in said
