"""Faults of the tutorials' own code: each is shown to be visible, and not to be here.

2: BERT's gradients divided by the world size in place of the data-parallel degree. 3: shards that start alike.
5: GPT2-XL silently another model under ZeRO-1. 6: masters dropped from checkpoints, a loss that shifts after resume.
10: saving one rank after the other, each file several times. 11: a fused QKV weight scrambled on import.
"""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.load_weights import load_hugging_face
from shardwise.checkpoint.storage.chunks import ChunkedWriter
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, check_layout, config_from_sections, load_config
from shardwise.data.open_data import prepare_data
from shardwise.distributed.collectives import Pending
from shardwise.distributed.mesh import Group
from shardwise.models.build import build_model
from shardwise.models.parameter_counts import parameter_count
from shardwise.train.build import build_trainer
from shardwise.train.mean_loss import count_targets
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.checkpoints import load as load_checkpoint
from tests.dist.checkpoints import make_trainer, step_folder
from tests.dist.checkpoints import run as run_checkpointed
from tests.dist.checkpoints import save as save_checkpoint
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import run as on_ranks
from tests.dist.test_checkpoint import config_of
from tests.e2e.processes import wait_for
from tests.hugging_face import VOCABULARY, described, make, save

STEPS = 8


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for recipe in ("bert-tiny", "gpt2-xl-tiny"):
        prepare_data(load_config(recipe, []), folder)
    return folder


def worst(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))


# ---- fault 2


# Clipping to a norm that some steps exceed and others do not.
CLIP = 1.7
UPDATES = {
    "adamw, clipped": [f"optimizer.max_norm={CLIP}", "optimizer.lr=2e-3"],
    "adamw, not clipped": ["optimizer.max_norm=null", "optimizer.lr=2e-3"],
    "lamb, clipped": [f"optimizer.max_norm={CLIP}", "optimizer.name=lamb", "optimizer.lr=2e-2"],
}
SHALLOW = "model.num_hidden_layers=2"
DP4 = ["train.micro_batch=2", SHALLOW]
TP2_DP2 = ["train.micro_batch=4", "parallel.tensor=2", SHALLOW]


def curve(recipe: str, overrides: list[str], cache: Path, divided_by: int = 1) -> tuple[list[float], list[float]]:
    """Losses and gradient norms on this rank. `divided_by`: of gradients alone, on top of what is right."""
    torch.set_num_threads(1)
    config = load_config(recipe, overrides)
    mesh = shared_mesh(config.parallel.tensor)
    trainer = build_trainer(config, mesh, prepare_data(config, cache))

    def counted(*given: Any) -> Pending:
        return Pending(count_targets(*given).wait() * divided_by)

    with mock.patch("shardwise.train.passes.count_targets", counted):
        records = [trainer.step() for _ in range(STEPS)]
    return [record.loss * divided_by for record in records], [record.grad_norm for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES)
def test_bert_has_the_same_curve_with_data_and_with_tensor_parallelism(update: str, ranks: Any, cache: Path) -> None:
    """Gradient norms too: an optimizer that normalises its step hides a factor, so long as nothing clips."""
    losses, norms = ranks(4).run(curve, "bert-tiny", [*UPDATES[update], *DP4], cache)[0]
    found_losses, found_norms = ranks(4).run(curve, "bert-tiny", [*UPDATES[update], *TP2_DP2], cache)[0]
    assert worst(found_losses, losses) <= 1e-5
    assert worst(found_norms, norms) <= 1e-4
    assert losses[-1] < 0.98 * losses[0], "a flat curve shows nothing"
    assert min(norms) < CLIP < max(norms), "the curve must have steps that clip and steps that do not"


@pytest.mark.slow
def test_gradients_divided_by_the_world_size_would_be_seen(ranks: Any, cache: Path) -> None:
    overrides = [*UPDATES["adamw, clipped"], *TP2_DP2]
    losses, norms = ranks(4).run(curve, "bert-tiny", overrides, cache)[0]
    found_losses, found_norms = ranks(4).run(curve, "bert-tiny", overrides, cache, 2)[0]
    assert found_norms[0] == pytest.approx(norms[0] / 2, rel=1e-5)
    assert worst(found_losses, losses) > 1e-4


# ---- fault 3


def initial(recipe: str, tensor: int) -> dict[str, Tensor]:
    """The canonical weights that a model starts with, on rank 0."""
    config = load_config(recipe, [f"parallel.tensor={tensor}", f"parallel.sequence={str(tensor > 1).lower()}"])
    mesh = shared_mesh(tensor)
    weights = canonical_weights(build_model(config, mesh.tp, sequence_parallel=tensor > 1))
    return weights if mesh.world.rank == 0 else {}


@pytest.mark.parametrize("recipe", [pytest.param("bert-tiny", marks=pytest.mark.slow), "llama2-tiny"])
def test_a_cut_model_starts_with_the_weights_of_the_whole(recipe: str, ranks: Any) -> None:
    whole = build_model(load_config(recipe, []), Group(), sequence_parallel=False)
    wanted = canonical_weights(whole)
    cut = {degree: ranks(4).run(initial, recipe, degree)[0] for degree in (2, 4)}
    std = load_config(recipe, []).model.initializer_range
    layers = load_config(recipe, []).model.num_hidden_layers
    for name, weight in wanted.items():
        for degree, weights in cut.items():
            assert torch.equal(weights[name], weight), f"{name} is another at TP {degree}"
        if weight.dim() == 1:
            continue
        # GPT-2 draws what is added to the residual stream smaller by √(2 · layers), at any degree.
        expected = std / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else std
        spread = float(weight.std()) / expected - 1
        assert abs(spread) < 5 / math.sqrt(2 * weight.numel()), f"{name}: standard deviation off by {spread:+.1%}"
        for degree, dim in ((2, 0), (2, 1), (4, 0), (4, 1)):
            shards = weight.tensor_split(degree, dim)
            alike = [shard for shard in shards[1:] if shard.shape == shards[0].shape and shard.equal(shards[0])]
            assert not alike, f"{name}: shards of TP {degree} are copies of the first"


# ---- fault 5


def gpt2_xl() -> Config:
    return load_config("gpt2-xl", [])


def test_gpt2_xl_is_gpt2_xl() -> None:
    """The published sizes, not the 24 heads, 1536 wide, and 50,304 tokens that the script trains under ZeRO-1."""
    config = gpt2_xl()
    model = config.model
    sizes = (model.num_hidden_layers, model.num_attention_heads, model.hidden_size, model.intermediate_size)
    assert sizes == (48, 25, 1600, 6400)
    assert (model.vocab_size, model.max_position_embeddings) == (50257, 1024)
    layout = check_layout(config, 32)
    assert (layout.data, layout.tensor, config.optimizer.zero) == (32, 1, 1)
    built = build_model(config, Group(), sequence_parallel=False, device="meta")
    shapes = {name: tuple(p.shape) for name, p in built.named_parameters()}
    assert (50257, 1600) in shapes.values()
    assert sum(math.prod(shape) for shape in shapes.values()) == parameter_count(model) == 1_557_611_200


ODD = {"num_attention_heads": 25, "hidden_size": 50, "intermediate_size": 200, "num_hidden_layers": 2}


def odd_config(zero: int) -> Config:
    """GPT2-XL's own heads, vocabulary and positions; fewer layers and narrower heads."""
    model = gpt2_xl().model.model_dump() | ODD | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    return config_from_sections(
        {
            "model": model,
            "train": {"steps": 4, "global_batch": 12, "micro_batch": 1, "sequence_length": 16},
            "optimizer": {"lr": 1e-3, "zero": zero},
            "precision": {"mode": "float32"},
            "data": {"dataset": "tiny"},
        }
    )


def train_odd(zero: int, cache: Path) -> tuple[list[float], dict[str, tuple[int, ...]], dict[str, int]]:
    """Losses, the shapes of the canonical tensors, and the bytes of the optimizer's state on this rank."""
    torch.set_num_threads(1)
    config = odd_config(zero)
    mesh = shared_mesh(1)
    # The tokens of a small vocabulary: 50,257 would want more text than the tiny corpus has.
    data = prepare_data(load_config("gpt2-xl-tiny", []), cache)
    trainer = build_trainer(config, mesh, data)
    losses = [trainer.step().loss for _ in range(4)]
    shapes = {name: tuple(tensor.shape) for name, tensor in canonical_weights(trainer.model).items()}
    return losses, shapes, trainer.optimizer.state_bytes()


def test_odd_heads_and_an_odd_vocabulary_train_under_zero(ranks: Any, cache: Path) -> None:
    """At four ranks, which divide neither; padding is no parameter, and no size is rounded."""
    wanted, _, whole = train_odd(0, cache)
    everyone = ranks(4).run(train_odd, 1, cache)
    losses, shapes, _ = everyone[0]
    assert worst(losses, wanted) <= 1e-5
    assert shapes["transformer.wte.weight"] == (50257, 50)
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (50, 150)
    parameters = parameter_count(odd_config(1).model)
    assert parameters == sum(math.prod(shape) for shape in shapes.values())
    held = sum(rank["state"] - rank["padding"] for _, _, rank in everyone)
    assert held == whole["state"] - whole["padding"] == 8 * parameters, "two float32 moments a parameter, over all"


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_the_tiny_recipe_trains_alike_with_zero_and_without(zero: int, ranks: Any, cache: Path) -> None:
    one, _ = curve("gpt2-xl-tiny", ["train.micro_batch=8"], cache)
    four, _ = ranks(4).run(curve, "gpt2-xl-tiny", ["train.micro_batch=2", f"optimizer.zero={zero}"], cache)[0]
    assert worst(four, one) <= 1e-5


# ---- fault 6


MIXED_ZERO = config_of(2, mode="mixed")


def resumed_curve(source: str, steps: int, drop_masters: bool) -> list[float]:
    """`drop_masters`: begin from the weights in the parameters' own dtype, as a checkpoint without masters would."""
    trainer = make_trainer(MIXED_ZERO)
    load_checkpoint(trainer, source)
    if drop_masters:
        for bucket in trainer.optimizer.buckets:
            assert bucket.separate, "mixed precision keeps masters apart"
            with torch.no_grad():
                bucket.master.copy_(bucket.master.bfloat16())
    return [trainer.step().loss for _ in range(steps)]


@pytest.mark.slow
def test_sharded_masters_survive_and_the_loss_goes_on(ranks: Any, tmp_path: Path) -> None:
    """ZeRO-1 over TP 2 × DP 2 in bfloat16: to the bit after a resume; a master that is rounded would be seen."""
    whole = on_ranks(ranks, 4, run_checkpointed, MIXED_ZERO, 3, 3, None, str(tmp_path))[0]
    stored = Manifest.read(Root.of(step_folder(tmp_path, 3)))
    names = set(stored.tensors["model"])
    assert set(stored.tensors) == {"model", "master", "exp_avg", "exp_avg_sq"}
    for state in ("master", "exp_avg", "exp_avg_sq"):
        assert set(stored.tensors[state]) == names, f"{state} of some weights is not stored"
    source = step_folder(tmp_path, 3)
    kept, dropped = (ranks(4).run(resumed_curve, source, 3, drop)[0] for drop in (False, True))
    assert kept == whole.losses[3:], "the loss shifts after a resume"
    assert dropped != whole.losses[3:], "rounded masters make no difference here, so the test shows nothing"


# ---- fault 10


PATIENCE = 60.0


def save_together(root: str, meeting: str) -> list[tuple[str, int]]:
    """Of each file that this rank wrote: name and bytes. Writing waits until every rank has begun as many files."""
    sizes: dict[str, int] = {}
    done: list[tuple[str, int]] = []
    begin, write, close = ChunkedWriter.__init__, ChunkedWriter.write, ChunkedWriter.close
    trainer = make_trainer(config_of(2))
    world = trainer.mesh.world

    def begin_together(self: Any, file: Root, size: int, path: str | None = None) -> None:
        begin(self, file, size, path)
        self.shown = str(file)
        sizes[self.shown] = 0
        if self.shown.endswith(".safetensors"):
            number = sum(name.endswith(".safetensors") for name in sizes)
            Path(meeting, f"{number}-{world.rank}").touch()
            begun = wait_for(lambda: len(list(Path(meeting).glob(f"{number}-*"))) == world.size, PATIENCE)
            assert begun, f"some rank begins its file {number} only when another has ended"

    def counting(self: Any, data: Any) -> None:
        sizes[self.shown] += memoryview(data).nbytes
        write(self, data)

    def closing(self: Any) -> Any:
        entry = close(self)
        done.append((entry.path, sizes[self.shown]))
        return entry

    trainer.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkedWriter, "__init__", begin_together)
        patch.setattr(ChunkedWriter, "write", counting)
        patch.setattr(ChunkedWriter, "close", closing)
        patch.setattr("shardwise.checkpoint.weight_writers._BYTES_WORTH_A_FILE", 1)
        (saved,) = save_checkpoint(trainer, root)
    assert saved.problem is None, saved.problem
    return done


def test_all_ranks_write_at_once_and_each_byte_once(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    written = [
        [each for each in files if each[0].endswith(".safetensors")]
        for files in ranks(4).run(save_together, str(tmp_path), str(tmp_path / "meeting"))
    ]
    assert [len(files) for files in written] == [2] * 4, "a shard of weights and the rank's own state"
    paths = [path for files in written for path, _ in files]
    assert len(set(paths)) == len(paths), "a file was written by two ranks, or twice"
    folder = Path(step_folder(tmp_path, 1))
    for path, count in (each for files in written for each in files):
        assert count == (folder / path).stat().st_size, f"{path}: bytes were written more than once"


# ---- fault 11


IDS = torch.arange(24).view(12, 2) * 7 % VOCABULARY


def logits(folder: Path, tensor: int, sequence: bool) -> Tensor:
    """Of a Hugging Face folder, cut over `tensor` ranks: [S, B, V]."""
    sections = {
        "model": described(folder).model_dump(),
        "parallel": {"tensor": tensor},
        "train": {"steps": 1, "global_batch": 4, "sequence_length": 8},
        "optimizer": {"lr": 1e-3},
    }
    config, mesh = config_from_sections(sections), shared_mesh(tensor)
    model: Any = build_model(config, mesh.tp, sequence_parallel=sequence)
    load_hugging_face(model, config.model, mesh, folder)
    with torch.no_grad():
        found: Tensor = model.logits(IDS)
    return found


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize(("world", "sequence"), [(2, False), (2, True), (4, True)], ids=["tp2", "tp2-sp", "tp4-sp"])
@pytest.mark.parametrize("case", ["neox", "neox-tied"])
def test_an_imported_neox_computes_what_it_did(
    case: str, world: int, sequence: bool, ranks: Any, tmp_path: Path
) -> None:
    theirs = save(case, tmp_path)
    with torch.no_grad():
        wanted = theirs(IDS.t()).logits.transpose(0, 1)
    for found in ranks(world).run(logits, tmp_path, world, sequence):
        assert difference(found, wanted) <= 1e-5


def test_a_scrambled_qkv_would_be_seen() -> None:
    """Rows kept head by head, [q, k, v] of each, but read as if all of Q came first."""
    theirs = make("neox")
    with torch.no_grad():
        wanted = theirs(IDS.t()).logits
        for layer in theirs.gpt_neox.layers:
            scramble(layer.attention.query_key_value, theirs.config.num_attention_heads)
        assert difference(theirs(IDS.t()).logits, wanted) > 0.1


def scramble(qkv: nn.Linear, heads: int) -> None:
    for tensor in (qkv.weight, qkv.bias):
        tensor.copy_(tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2).clone())
