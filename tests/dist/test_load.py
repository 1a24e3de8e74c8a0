"""A Hugging Face folder at any layout: bit-equal in and out, each rank reads its own part; sparse models in use."""

import functools
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.format import stored_tensors
from shardwise.checkpoint.load_weights import load_hugging_face
from shardwise.checkpoint.storage.root import Root
from shardwise.cli import main
from shardwise.config import Config, check_layout, config_from_sections
from shardwise.data.formats.prepared_data import make_evaluation_batches
from shardwise.data.samples.batch import Batches
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.placement import placements
from shardwise.models.build import build_model
from shardwise.models.llama import Llama
from shardwise.optim.state_digest import TensorSums
from shardwise.optim.state_hash import StateSums
from shardwise.pipeline.stages import build_stages
from shardwise.train.build import build_trainer
from shardwise.train.evaluation_losses import evaluate
from shardwise.train.model_checks import check_replicas
from shardwise.verify.canonical_values import canonical_weights
from shardwise_use.generation import TokenSampler, generate_tokens
from shardwise_use.importing.hugging_face import open_hugging_face
from shardwise_use.task_requests import ScoreRequest, TaskModel, TextRequest
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import run
from tests.dist.test_experts import SIZES, V
from tests.dist.training import SPARSE, cases, make_data, named
from tests.hugging_face import CASES, described, export_hugging_face, open_folder, save
from tests.sweeps import few

# (ranks, TP, sequence parallelism): what is not TP is data parallelism.
LAYOUTS = {"tp2": (2, 2, False), "tp4-sp": (4, 4, True), "tp2-dp2-sp": (4, 2, True), "dp2": (2, 1, False)}
BEGUN = cases("load")
FAMILIES = {"olmoe": "Olmoe", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "glm4_moe": "Glm4Moe"}
OFTEN = ("glm4_moe",)
PROMPT = [5, 9, 2, 40, 11]
REQUESTS = [ScoreRequest([1, 2, 3, 4, 5, 6, 7][: 3 + number % 5], 1 + number % 2) for number in range(5)]
TEXTS = [TextRequest([7, number], 2 + 3 * number, ["END"], temperature=0.8) for number in range(3)]


def configured(folder: Path, tensor: int, **parallel: Any) -> Config:
    return config_from_sections(
        {
            "model": described(folder).model_dump(),
            "parallel": {"tensor": tensor, **parallel},
            "train": {"steps": 1, "global_batch": 4, "sequence_length": 8},
            "optimizer": {"lr": 1e-3},
        }
    )


def loaded(folder: Path, tensor: int, sequence: bool, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Mesh]:
    config, mesh = configured(folder, tensor), shared_mesh(tensor)
    model = build_model(config, mesh.tp, sequence_parallel=sequence, dtype=dtype)
    load_hugging_face(model, config.model, mesh, folder)
    return model, mesh


def in_and_out(source: Path, target: Path, tensor: int, sequence: bool) -> list[str]:
    """Load, and export again; returns the parameters whose padding is not 0."""
    model, mesh = loaded(source, tensor, sequence)
    export_hugging_face(model, described(source), mesh, target)
    padded = []
    for name, parameter, placement in placements(model):
        inside = torch.zeros_like(parameter, dtype=torch.bool)
        for piece in placement.pieces:
            inside[piece.local.slices] = True
        if parameter[~inside].any():
            padded.append(name)
    return padded


@pytest.mark.parametrize(
    ("case", "layout"), few(itertools.product(CASES, LAYOUTS), *((case, "tp4-sp") for case in ("llama", "gpt", "bert")))
)
def test_in_and_out_is_bit_equal(case: str, layout: str, ranks: Any, tmp_path: Path) -> None:
    theirs = save(case, tmp_path / "theirs")
    world, tensor, sequence = LAYOUTS[layout]
    padded = ranks(world).run(in_and_out, tmp_path / "theirs", tmp_path / "ours", tensor, sequence)
    assert padded == [[]] * world, "padding must stay 0"
    wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert set(found) == set(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    again = open_folder(tmp_path / "ours").state_dict()
    assert [name for name, tensor in theirs.state_dict().items() if not torch.equal(tensor, again[name])] == []
    assert described(tmp_path / "ours") == described(tmp_path / "theirs")


def begin(
    folder: Path, tensor: int, zero: int, replicate: int, mode: str
) -> tuple[dict[str, torch.Tensor], TensorSums, list[float]]:
    """Weights, and their sums, with which a training of the folder begins on this rank; losses and norms of 2 steps."""
    sections = configured(folder, tensor, replicate=replicate).model_dump(exclude_unset=True)
    sections["train"] |= {"dropout_mode": "invariant"}
    sections["optimizer"] |= {"zero": zero, "warmup_steps": 0}
    config = config_from_sections({**sections, "precision": {"mode": mode}})
    trainer = build_trainer(config, shared_mesh(tensor), make_data(config.model.vocab_size), weights=Root.of(folder))
    sums = StateSums(trainer.model, trainer.optimizer, trainer.mesh).measure()
    weights = canonical_weights(trainer.model, optimizer=trainer.optimizer)
    records = [trainer.step() for _ in range(2)]
    check_replicas(trainer.model, trainer.mesh, 2, trainer.optimizer)
    return weights, sums, [number for r in records for number in (r.loss, r.grad_norm, r.param_norm or 0.0)]


@pytest.mark.parametrize(("case", "tensor", "zero", "replicate", "mode"), few(BEGUN, BEGUN[1]))
def test_copies_begin_with_all_of_a_folder(
    case: str, tensor: int, zero: int, replicate: int, mode: str, ranks: Any, tmp_path: Path
) -> None:
    """Where several ranks own the same part: its weights, hashes, losses and norms are those of one process."""
    save(case, tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    _, sums, numbers = begin(tmp_path, 1, 0, 1, mode)
    for weights, found_sums, found in ranks(4).run(begin, tmp_path, tensor, zero, replicate, mode):
        assert all(torch.equal(weights[name], weight.to(weights[name])) for name, weight in wanted.items())
        assert found_sums == sums
        assert found == pytest.approx(numbers, rel=1e-5 if mode == "float32" else 1e-2)


def refusal(sound: Path, damaged: Path) -> list[str]:
    """What this rank says where only the last rank's files are damaged."""
    config, mesh = configured(sound, 2), shared_mesh(2)
    model = build_model(config, mesh.tp, sequence_parallel=False, dtype=torch.float32)
    last = mesh.world.rank == mesh.world.size - 1
    try:
        load_hugging_face(model, config.model, mesh, damaged if last else sound)
    except ConfigError as error:
        return [problem.replace(str(damaged), str(sound)) for problem in error.problems]
    return []


@pytest.mark.parametrize("damage", ["truncated", "copy", "not finite"])
def test_all_ranks_fail_where_one_does(damage: str, ranks: Any, tmp_path: Path) -> None:
    """A node whose disk has other files must not leave its peers waiting."""
    sound, damaged = tmp_path / "sound", tmp_path / "damaged"
    save("gpt", sound)
    damaged.mkdir()
    weights = load_file(sound / "model.safetensors")
    if damage == "copy":
        weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
        weights["lm_head.weight"][-1] += 1  # the last rank's row
    if damage == "not finite":
        weights["transformer.wte.weight"][-1, 0] = torch.inf
        weights["transformer.ln_f.bias"][:3] = torch.nan
    save_file(weights, damaged / "model.safetensors")
    if damage == "truncated":
        with (damaged / "model.safetensors").open("r+b") as file:
            file.truncate(1000)
    answers = ranks(4).run(refusal, sound, damaged)
    assert answers == [answers[0]] * 4
    assert len(answers[0]) == 1
    text = {
        "truncated": "is damaged",
        "copy": "must equal",
        "not finite": "NaN or infinite in transformer.wte.weight and transformer.ln_f.bias",
    }
    assert text[damage] in answers[0][0]


def written(family: str, folder: Path, *, fused: bool, **keys: Any) -> Any:
    """A model of transformers with clear choices, and its folder."""
    transformers = pytest.importorskip("transformers")
    own = {name: value for name, value in SPARSE[family].items() if name != "family"}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**SIZES | own | tokens | keys)
    torch.manual_seed(0)
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.ndim > 1:
                tensor.normal_(0.0, 0.15)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.linspace(-0.1, 0.1, len(tensor)))
    model.save_pretrained(folder, save_original_format=not fused)
    return model


def loaded_experts(folder: Path, parallel: dict[str, int]) -> tuple[dict[str, torch.Tensor], int]:
    """The whole weights of a model of several ranks that reads the folder, and the bytes that this rank read."""
    sections = {
        "model": described(folder).model_dump(),
        "parallel": parallel,
        "train": {"steps": 1, "global_batch": 4, "sequence_length": 8},
        "optimizer": {"lr": 1e-3},
    }
    config = config_from_sections(sections)
    mesh = Mesh(**config.parallel.degrees, device="cpu")
    model = build_stages(config, check_layout(config, mesh.world.size), mesh, dtype=torch.float32)
    count = 0
    read_range = stored_tensors.read_range

    def counted(file: Any, start: int, stop: int) -> bytes:
        nonlocal count
        count += stop - start
        return read_range(file, start, stop)

    stored_tensors.read_range = counted
    try:
        load_hugging_face(model, config.model, mesh, folder)
    finally:
        stored_tensors.read_range = read_range
    return canonical_weights(model, mesh.pp), count


@pytest.mark.parametrize("family", few(FAMILIES, *OFTEN))
def test_both_forms_are_read_at_every_layout(family: str, ranks: Any, tmp_path: Path) -> None:
    theirs = written(family, tmp_path / "fused", fused=True, num_hidden_layers=4)
    written(family, tmp_path / "single", fused=False, num_hidden_layers=4)
    ids = torch.randint(V, (16, 2), generator=torch.Generator().manual_seed(0))
    logits = theirs(ids.t()).logits.transpose(0, 1)
    wanted, _ = loaded_experts(tmp_path / "single", {})
    for form in ("fused", "single"):
        model = Llama(described(tmp_path / form), seed=1)
        load_hugging_face(model, model.config, Mesh(device="cpu"), tmp_path / form)
        assert (model.logits(ids) - logits).abs().max() < 1e-5
    fused = load_file(tmp_path / "fused/model.safetensors")
    total, experts = (
        sum(t.nbytes for name, t in fused.items() if not part or ".experts." in name) for part in (False, True)
    )
    for parallel in ({"expert": 4}, {"tensor": 2, "expert": 2}, {"pipeline": 2, "expert": 2}):
        for found, read in run(ranks, 4, loaded_experts, tmp_path / "fused", parallel):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
            if parallel == {"expert": 4}:
                assert read <= total - experts * 3 // 4


def problem(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_hugging_face(Root.of(folder))
    (line,) = caught.value.problems
    return line.replace(f"{folder}", "IT")


def change(folder: Path, edit: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def describe(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def transpose(weights: dict[str, torch.Tensor]) -> None:
    for name in weights:
        if name.endswith(("gate_up_proj", "down_proj")):
            weights[name] = weights[name].transpose(1, 2)


# The width at which no dimension, and gate_up's and down's are equal.
@pytest.mark.parametrize("width", [24, 16])
def test_transposed_fused_tensors_are_refused_where_their_shapes_fit_too(width: int, tmp_path: Path) -> None:
    written("qwen3_moe", tmp_path, fused=True, moe_intermediate_size=width)
    assert open_hugging_face(Root.of(tmp_path)).weights
    change(tmp_path, transpose)
    assert problem(tmp_path) == (
        f"IT: model.layers.0.mlp.experts.gate_up_proj [8, 32, {2 * width}] and down_proj [8, {width}, 32] must be "
        "[experts, 2 × width, hidden size] and [experts, hidden size, width]: they are transposed or of two models; "
        "save the model with one tensor for each expert, as transformers does by default"
    )
    change(tmp_path, transpose)
    if width == 16:
        # transformers 5 is known to transpose none, and its version is the only trace of a program in a folder.
        describe(tmp_path, transformers_version="4.57.1")
        assert "may be transposed, which two equal dimensions hide" in problem(tmp_path)


def test_experts_that_are_not_the_model_s_are_one_sentence(tmp_path: Path) -> None:
    def drop(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "layers.2.mlp.experts.3." in name]:
            del weights[name]

    written("glm4_moe", tmp_path, fused=False)
    change(tmp_path, drop)
    assert problem(tmp_path) == "IT lacks expert 3 of block 2"
    written("glm4_moe", tmp_path, fused=True)
    describe(tmp_path, n_routed_experts=4, n_group=2)
    assert problem(tmp_path) == "IT has experts 4…7 of blocks 1…2, which the model lacks"
    describe(tmp_path, n_routed_experts=8, first_k_dense_replace=0)
    assert problem(tmp_path) == "IT has experts in blocks 1…2, and the model in blocks 0…2"


def test_an_import_of_both_forms_is_one_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("fused", "single"):
        written("mixtral", tmp_path / form, fused=form == "fused")
        assert main(["checkpoint", "import", str(tmp_path / form), str(tmp_path / f"of-{form}")]) == 0
    steps = [str(tmp_path / f"of-{form}/step-00000000") for form in ("fused", "single")]
    assert main(["checkpoint", "diff", *steps]) == 0
    assert "equal" in capsys.readouterr().out


class Numbers:
    """A tokenizer whose text of a token is its number."""

    def decode(self, tokens: list[int], *, skips_special: bool = False) -> str:
        return " ".join(map(str, tokens))


@functools.cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="shardwise-test-"))
    written("glm4_moe", path, fused=True, num_hidden_layers=4)
    return path


def use(path: Path, parallel: dict[str, int]) -> tuple[list[int], list[int], list[Any], list[str], float]:
    """Tokens, likeliest and drawn; scores and texts of requests, on rank 0; the loss of a text."""
    replicas = parallel.get("expert", 1)
    config = config_from_sections(
        {
            "model": described(path).model_dump(),
            "parallel": parallel,
            "train": {"steps": 1, "global_batch": 4 * replicas, "micro_batch": 2, "sequence_length": 16},
            "optimizer": {"lr": 1e-3},
        }
    )
    mesh = Mesh(**config.parallel.degrees, device="cpu")
    model = build_stages(config, check_layout(config, mesh.world.size), mesh, dtype=torch.float32)
    load_hugging_face(model, config.model, mesh, path)
    model.eval()
    likeliest, drawn = (
        list(generate_tokens(model, mesh, PROMPT, 6, TokenSampler(heat, seed=4), chunk=3, parallel=config.parallel))
        for heat in (0.0, 1.0)
    )
    tasks = TaskModel(model, mesh, config.parallel, Numbers(), frozenset(), 2)  # type: ignore[arg-type]
    answers = tasks.while_others_answer(lambda: (tasks.scores(REQUESTS), tasks.texts(TEXTS)))
    scores, texts = answers or ([], [])
    data = make_data(V, 5)  # the last portion is filled up
    batches: Batches | None = make_evaluation_batches(config, data, "train")
    loss = evaluate(model, batches, mesh, 2, parallel=config.parallel).loss
    return likeliest, drawn, scores, texts, loss


@functools.cache
def alone() -> tuple[list[int], list[int], list[Any], list[str], float]:
    return use(folder(), {})


@pytest.mark.parametrize(("world", "parallel"), named("use of experts", "EP 2"))
def test_a_model_in_use_is_that_of_one_process(world: int, parallel: dict[str, int], ranks: Any) -> None:
    likeliest, drawn, scores, texts, loss = alone()
    answers = run(ranks, world, use, folder(), parallel)
    for found_likeliest, found_drawn, _, _, found_loss in answers:
        assert (found_likeliest, found_drawn) == (likeliest, drawn)
        assert found_loss == pytest.approx(loss, rel=1e-6)
    _, _, found_scores, found_texts, _ = answers[0]
    assert found_texts == texts
    assert [score.is_likeliest for score in found_scores] == [score.is_likeliest for score in scores]
    assert [s.log_probability for s in found_scores] == pytest.approx([s.log_probability for s in scores], abs=1e-4)
