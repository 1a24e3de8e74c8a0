"""Files of torch's Hugging Face writer, each with parts of tensors, as two ranks write them: read as any folder is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.base.errors import ConfigError
from shardwise.base.tensor_box import Box
from shardwise.checkpoint.format.manifest import MODEL
from shardwise.checkpoint.format.stored_tensors import StoredTensors
from shardwise.checkpoint.format.weight_files import check_weights
from shardwise.checkpoint.storage.root import DamageError, Root
from shardwise_use.importing.hugging_face import open_hugging_face
from tests.hugging_face import open_folder
from tests.rank_pool import RankPool
from tests.unit.use.importing.checks import assert_same_model

SIZES = {
    "vocab_size": 67, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 32,
}  # fmt: skip
PARTS = {
    "llama": {"intermediate_size": 44, "num_key_value_heads": 1},
    "qwen3_moe": {"moe_intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 1},
}


def make(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **PARTS[kind]), dtype=torch.float32)
    return model.eval()


def save(folder: str, kind: str, dim: int) -> None:
    """Save the weights as transformers does: on two ranks, cut along `dim` where a tensor has it."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(min(dim, tensor.dim() - 1))])
        for name, tensor in make(kind).state_dict().items()
    }
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))


@pytest.fixture(scope="module")
def folders(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    found: dict[tuple[str, int], Path] = {}
    for kind, dim in (("llama", 0), ("llama", 1), ("qwen3_moe", 2)):
        path = tmp_path_factory.mktemp("shards") / kind
        ranks(2).run(save, str(path), kind, dim)
        make(kind).config.save_pretrained(path)
        found[kind, dim] = path
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_is_the_same_as_from_whole_tensors(folders: dict[tuple[str, int], Path], tmp_path: Path) -> None:
    for (kind, dim), folder in folders.items():
        assert [file.name for file in sorted(folder.glob("*.safetensors"))] == [
            f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)
        ]
        check_weights(folder)
        model = make(kind)
        # transformers opens the files too, and finds the same weights.
        for name, weight in open_folder(folder).state_dict().items():
            assert torch.equal(weight, model.state_dict()[name]), name
        at = tmp_path / f"{kind}-{dim}"
        model.save_pretrained(at / "saved")
        assert_same_model(open_hugging_face(Root.of(folder)), model, at)


def test_boxes_over_the_borders_of_parts(folders: dict[tuple[str, int], Path]) -> None:
    weights = make("llama").state_dict()
    for dim in (0, 1):
        tensors = StoredTensors.of(Root.of(folders["llama", dim]))
        for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
            wanted = weights[name].numpy()
            for low in range(0, len(wanted), 5):
                size = (min(9, len(wanted) - low), *(3 for _ in wanted.shape[1:]))
                box = Box((low, *(10 for _ in wanted.shape[1:])), size)
                assert (tensors.read(MODEL, name, box) == wanted[box.slices]).all()


def test_missing_and_contradicting_files_are_named(folders: dict[tuple[str, int], Path], tmp_path: Path) -> None:
    first, second = (f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2))
    half = tmp_path / "half"
    shutil.copytree(folders["llama", 0], half)
    (half / first).unlink()
    wanted = r"must have the files shard-\*-model-\*\.safetensors of all ranks of one save, and lacks {}: fetch or copy"
    with pytest.raises(ConfigError, match=wanted.format(first)):
        StoredTensors.of(Root.of(half))
    shutil.copy(folders["llama", 0] / first, half)
    (half / second).unlink()
    with pytest.raises(ConfigError, match=wanted.format(second)):  # the model's shapes say how many ranks there were
        open_hugging_face(Root.of(half))
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    shutil.copy(folders["llama", 0] / second, half)
    with pytest.raises(ConfigError, match=r"shape of lm_head\.weight \[67, 24\] must be \[100, 24\]"):
        open_hugging_face(Root.of(half))
    shutil.copy(half / first, half / second)
    with pytest.raises(ConfigError, match="are missing, or there twice"):
        StoredTensors.of(Root.of(half))
    tensors = load_file(folders["llama", 0] / second)
    for text in ('{"lm_head.weight": {}}', '{"other": {"saved_offsets": [0, 0]}}', "[", '{"lm_head.weight": 3}', "[]"):
        save_file(tensors, half / second, {"format": "pt", "DCP_SHARDING_INFO": text})
        with pytest.raises(DamageError, match="its header cannot be used"):
            StoredTensors.of(Root.of(half))
