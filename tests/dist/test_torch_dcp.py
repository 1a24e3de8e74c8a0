"""Folders of torch.distributed.checkpoint from two ranks, also as Hugging Face files: boxes are read, no code runs."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.base.errors import ConfigError, DamageError
from shardwise.base.tensor_box import Box
from shardwise.checkpoint.format.manifest import MODEL
from shardwise.checkpoint.format.stored_tensors import StoredTensors
from shardwise.checkpoint.format.weight_files import check_weights
from shardwise.checkpoint.storage.root import Root
from shardwise_use.importing.hugging_face import open_hugging_face
from shardwise_use.importing.torch_dcp import DcpFolder, LazyTensor
from tests.hugging_face import open_folder
from tests.rank_pool import RankPool
from tests.unit.use.importing.checks import assert_same_model

NAMES = ("rows", "columns", "grid", "whole", "half", "count", "empty")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(7, 5, generator=generator),  # uneven: 4 and 3 rows
        "columns": torch.randn(6, 9, generator=generator),
        "grid": torch.randn(3, 4, 6, generator=generator),
        "whole": torch.randn(8, 3, generator=generator).t(),  # saved as it lies in memory: column by column
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "count": torch.tensor(12),
        "empty": torch.zeros(0, 4),
    }


def save(folder: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed = {"rows": Shard(0), "columns": Shard(1), "grid": Shard(1), "half": Shard(0), "empty": Replicate()}
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [placed[name]]) if name in placed else tensor
        for name, tensor in tensors().items()
    }
    objects = {"step": 5, "betas": (0.9, 0.95), "nested": {"list": [1, {"a": 2}]}}
    dcp.save(
        {"model": state, "objects": objects, f"rank_{dist.get_rank()}": {"seed": dist.get_rank()}}, checkpoint_id=folder
    )


@pytest.fixture(scope="module")
def folder(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "step-5"
    ranks(2).run(save, str(path))
    return path


def test_boxes_and_views_of_every_tensor_and_objects(folder: Path) -> None:
    opened = DcpFolder.open(folder)
    assert {name.removeprefix("model.") for name in opened.tensors} == set(NAMES)
    for name, wanted in tensors().items():
        tensor = opened.tensors[f"model.{name}"]
        assert (tensor.shape, tensor.dtype) == (tuple(wanted.shape), wanted.dtype)
        assert torch.equal(tensor.read(), wanted)
        data = b"".join(bytes(part) for part in tensor.segments())
        assert data == wanted.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        # Every box of a matrix, over the border of the chunks and inside of one.
        for low in range(wanted.shape[0] if wanted.dim() == 2 else 0):
            for high in range(low + 1, len(wanted) + 1):
                box = Box((low, 1), (high - low, 2))
                assert torch.equal(tensor.read(box), wanted[low:high, 1:3])
    opened, wanted = DcpFolder.open(folder), tensors()
    rows, grid = opened.tensors["model.rows"], opened.tensors["model.grid"]
    assert torch.equal(grid[2].rows(1, 4).t.read(), wanted["grid"][2, 1:4].t())
    assert torch.equal(rows.t.read(Box((1, 2), (3, 4))), wanted["rows"].t()[1:4, 2:6])
    both = LazyTensor.cat([rows, rows.rows(2, 5), LazyTensor.of(wanted["rows"])])
    whole = torch.cat([wanted["rows"], wanted["rows"][2:5], wanted["rows"]])
    assert both.shape == tuple(whole.shape)
    for low in range(len(whole)):
        assert torch.equal(both.rows(low, min(low + 5, len(whole))).read(), whole[low : low + 5])
    flipped = rows.rows(0, 6).by_rows(2, lambda block: block.flip(0))
    assert torch.equal(flipped.rows(1, 4).read(), wanted["rows"][[0, 3, 2]])
    opened = DcpFolder.open(folder)
    found = {name: opened.object(name) for name in opened.objects}
    assert found == {
        "objects.step": 5, "objects.betas": (0.9, 0.95), "objects.nested.list.0": 1, "objects.nested.list.1.a": 2,
        "rank_0.seed": 0, "rank_1.seed": 1,
    }  # fmt: skip


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


def rewritten(folder: Path, copy: Path, change: Callable[[Any], Any]) -> Path:
    shutil.copytree(folder, copy)
    record = pickle.loads((folder / ".metadata").read_bytes())
    (copy / ".metadata").write_bytes(pickle.dumps(change(record) or record))
    return copy


def read_all(folder: Path) -> None:
    opened = DcpFolder.open(folder)
    for tensor in opened.tensors.values():
        tensor.read()
    for name in opened.objects:
        opened.object(name)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_all(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text.replace(str(folder), "DIR")


def test_metadata_that_asks_for_more_is_refused(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    copy = rewritten(folder, tmp_path / "part", lambda record: setattr(record, "planner_data", Malicious(mark)))
    assert "its pickle names io.open, by which opening it could run code; none was run" in refusal(copy)
    copy = rewritten(folder, tmp_path / "other", lambda record: Malicious(mark))
    assert "DIR/.metadata is refused" in refusal(copy)
    assert not mark.exists()
    # It would have run.
    pickle.loads((copy / ".metadata").read_bytes()).close()
    assert mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_entries_that_ask_for_more_are_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    mark = tmp_path / "ran"
    path = tmp_path / "dcp"
    dcp.save({"a": torch.ones(2), "o": Malicious(mark)}, checkpoint_id=path, no_dist=True)
    assert "(o) is refused: beside tensors and plain values its pickle names io.open" in refusal(path)
    # A chunk whose file holds another thing than the tensor.
    record = pickle.loads((path / ".metadata").read_bytes())
    places = {index.fqn: info for index, info in record.storage_data.items()}
    places["a"].__dict__.update(places["o"].__dict__)
    (path / ".metadata").write_bytes(pickle.dumps(record))
    assert "__0_0.distcp is refused" in refusal(path)
    assert not mark.exists()


def test_damage_is_named(folder: Path, tmp_path: Path) -> None:
    def half(record: Any) -> None:
        (tmp_path / "half" / "__1_0.distcp").unlink()

    def version(record: Any) -> None:
        record.version = "2.0.0"

    def outside(record: Any) -> None:
        for info in record.storage_data.values():
            info.relative_path = "../secret"

    def gap(record: Any) -> None:
        record.state_dict_metadata["model.rows"].chunks.pop()

    def moved(record: Any) -> None:
        for info in record.storage_data.values():
            info.offset += 1

    expected = {
        half: "DIR must have the files of all ranks: of 2 that its .metadata names it lacks __1_0.distcp",
        version: "DIR/.metadata: its version ('2.0.0') must be '1.0.0'",
        outside: "DIR/.metadata must name files in its folder, and it names '../secret'",
        gap: "DIR: the chunks of model.rows must tile its shape [7, 5]",
        moved: "after the end of the file",
    }
    for change, message in expected.items():
        assert message in refusal(rewritten(folder, tmp_path / change.__name__, change))
    copy = tmp_path / "half"
    (copy / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-20])
    assert "DIR/.metadata is truncated or no pickle of torch's Metadata" in refusal(copy)
    assert "with .metadata: it has none" in refusal(tmp_path)
    for file in copy.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    shutil.copy(folder / "__1_0.distcp", copy)
    shutil.copy(folder / ".metadata", copy)
    assert "is damaged" in refusal(copy)


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


def save_shards(folder: str, kind: str, dim: int) -> None:
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
        ranks(2).run(save_shards, str(path), kind, dim)
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
