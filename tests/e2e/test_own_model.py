"""docs/own-model.md: its changes make sharded.py of plain.py, its commands and code run, and what it promises holds."""

import difflib
import functools
import importlib.util
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise.config import Config, load_config
from shardwise.data.formats.prepared_data import make_batches
from shardwise.data.open_data import prepare_data
from shardwise.distributed import collectives
from tests.arch.source import ROOT
from tests.dist import dense
from tests.dist.test_families import gradients_of
from tests.e2e.command import ALONE, Outcome, metrics, outcome, shardwise, start
from tests.e2e.test_pages import assert_shown
from tests.e2e.test_pages import blocks as page_blocks
from tests.sweeps import few

EXAMPLE = ROOT / "examples" / "own_model"
PLAIN, SHARDED = ((EXAMPLE / name).read_text(encoding="utf-8") for name in ("plain.py", "sharded.py"))
STEPS, OPTIONAL = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("own-model.md", "own-model-options.md")
)
PAGE = STEPS + OPTIONAL
MAX_CHANGED = 60
RECIPE = "examples/own_model/own.yaml"
SCRIPT = Path(__file__).parents[2] / "examples" / "zero1.py"


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def changed_lines(diff: Iterable[str]) -> int:
    return sum(line[:1] in "+-" and not line.startswith(("+++", "---")) for line in diff if line)


def changed(text: str, diffs: list[str]) -> str:
    """`text` after the diffs, each of which must fit in exactly one place."""
    for diff in diffs:
        old, new = (
            "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in kept) for kept in (" -", " +")
        )
        assert text.count(old) == 1, f"this change fits in {text.count(old)} places:\n{diff}"
        text = text.replace(old, new)
    return text


def test_the_changes_of_the_page_make_sharded_of_plain() -> None:
    assert changed(PLAIN, blocks("diff", STEPS)) == SHARDED
    assert "checkpoint(block, x" in changed(SHARDED, blocks("diff", OPTIONAL)), "dropout and recompute"
    # Removed and added lines together: what a diff shows, and what the page shows.
    shown = changed_lines("".join(blocks("diff", STEPS)).splitlines())
    diff = difflib.unified_diff(PLAIN.splitlines(), SHARDED.splitlines(), lineterm="")
    assert changed_lines(diff) <= MAX_CHANGED
    assert shown <= MAX_CHANGED
    assert f"all differences between the two files: {shown} lines" in PAGE
    (block,) = blocks("yaml", STEPS)
    shown, whole = (yaml.safe_load(text) for text in (block, (ROOT / RECIPE).read_text(encoding="utf-8")))
    assert shown == {section: whole[section] for section in shown}
    parts = [line.strip() for line in (EXAMPLE / "parts.py").read_text(encoding="utf-8").splitlines()]
    shown = [block for block in blocks("python", OPTIONAL) if not block.startswith("# ")]
    assert len(shown) == 3
    for block in shown:
        assert "\n".join(line.strip() for line in block.splitlines()) in "\n".join(parts), block


def test_the_wrapper_of_the_page_sums_what_plain_averages() -> None:
    (code,) = (block for block in blocks("python", OPTIONAL) if block.startswith("# wrapped.py\n"))
    scope: dict[str, Any] = {}
    exec(compile(code, "own-model.md", "exec"), scope)
    model = scope["Trained"](64, 16, 32, 1, 2)
    ids, targets = torch.randint(64, (2, 3, 8))
    targets[0, :5] = -100
    plain_model = scope["Decoder"](64, 16, 32, 1, 2)
    plain_model.load_state_dict(model.state_dict())
    assert model.logits(ids.t()).shape == (8, 3, 64)
    assert model(ids.t(), targets.t()).item() == pytest.approx(plain_model(ids, targets).item() * 19, rel=1e-5)


@dataclass(frozen=True)
class Followed:
    """A folder with the examples, in which the page's trainings were run in their order; what each printed.

    The recipe has two blocks, large micro-batches and half of the steps, to save time.
    """

    at: Path
    outcomes: dict[str, Outcome]

    def run(self, name: str) -> Path:
        return self.at / "runs" / name

    @property
    def weights(self) -> Path:
        return self.run("four") / "checkpoints/step-00000010"

    @property
    def config(self) -> Config:
        return load_config(str(self.at / RECIPE))


COMMANDS = "".join(blocks("sh")).replace("\\\n", "").splitlines()
PROGRAMS = {
    "shardwise": ALONE,
    "python": (sys.executable,),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone"),
}


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    at = tmp_path_factory.mktemp("own")
    shutil.copytree(ROOT / "examples", at / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    recipe = (at / RECIPE).read_text(encoding="utf-8")
    sizes = {"num_hidden_layers: 4": "num_hidden_layers: 2", "micro_batch: 2": "micro_batch: 4"}
    for whole, small in {**sizes, "  steps: 20": "  steps: 10", "eval_every: 20": "eval_every: 10"}.items():
        assert recipe.count(whole) == 1
        recipe = recipe.replace(whole, small)
    (at / RECIPE).write_text(recipe, encoding="utf-8")
    first_lines = [line for line in COMMANDS if line.startswith("shardwise train")][:2]
    return Followed(at, {line: follow(line, at) for line in first_lines})


def follow(line: str, at: Path) -> Outcome:
    program, *arguments = shlex.split(line, comments=True)
    return shardwise(*arguments, at=at, program=PROGRAMS[program]).succeeded()


@pytest.mark.slow
def test_verify_compares_both_models(followed: Followed) -> None:
    (wrapper,) = (block for block in blocks("python", OPTIONAL) if block.startswith("# wrapped.py\n"))
    (followed.at / "wrapped.py").write_text(wrapper)
    others = [line for line in COMMANDS if line not in followed.outcomes]
    first, *said, _, _, _, compared, wrapped = [follow(line, followed.at).out for line in others]
    assert len(said) == 2
    assert "both     5 steps" in compared
    page = [block for name in ("own-model", "own-model-options") for block in page_blocks(f"docs/{name}.md")]
    of_curves, of_verify, _, of_wrapped = page
    trained = "".join(outcome.out for outcome in followed.outcomes.values())
    for block, out in ((of_curves, trained + first), (of_verify, "".join(said)), (of_wrapped, wrapped)):
        assert block.shown
        assert_shown(block, out)
    assert [re.findall(r"dp=\d, tp=\d", text) for text in said] == [["dp=1, tp=1"], ["dp=2, tp=2"]]
    for text in said:
        (worst,) = re.findall(r"differ by at most (\S+)", text)
        assert float(worst) <= 1e-5
        (worst,) = re.findall(r"whose change differs most: \S+, by (\S+)", text)
        assert float(worst) <= 2e-4
    counts = [re.findall(r"([\d,]+) of ([\d,]+) parameters", text) for text in said]
    assert counts == [[("204,224", "204,224")], [("102,720", "204,224")]], "half of a vocabulary of 302 rows is held"


def test_plain_computes_the_runs_evaluation_loss(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own code loads the export of four ranks into plain.py's model."""
    monkeypatch.chdir(followed.at)
    (code,) = (block for block in blocks("python") if block.startswith("# after the runs above\n"))
    scope: dict[str, Any] = {}
    exec(compile(code.replace("step-00000020", "step-00000010"), "own-model.md", "exec"), scope)
    model, config = scope["model"], followed.config
    evaluation = make_batches(config, prepare_data(config), "eval")
    total, counted = 0.0, 0
    with torch.no_grad():
        for batch in evaluation.eval_batches(config.train.eval_batches, config.train.global_batch, 0, 1, 2):
            ids, targets = (torch.from_numpy(batch.inputs[name]).t() for name in ("ids_SB", "targets_SB"))
            count = int(batch.counts[0])
            total, counted = total + (float(model(ids, targets)) * count if count else 0.0), counted + count
    ours = metrics(followed.run("four"), "eval")[-1]["loss"]
    assert total / counted == pytest.approx(ours, rel=1e-5)


def test_four_ranks_have_the_losses_of_one_and_what_is_known_is_exact(followed: Followed) -> None:
    one, four = (metrics(followed.run(name)) for name in ("one", "four"))
    events = [(record["event"], record["loss"]) for record in one if "loss" in record]
    assert [name for name, _ in events].count("step") == 10
    assert [name for name, _ in events].count("eval") == 2
    losses = [record["loss"] for record in four if "loss" in record]
    assert losses == pytest.approx([loss for _, loss in events], rel=1e-5)
    assert events[-1][1] < 0.95 * events[0][1], "the model does not learn, so equal losses show little"
    parameters = sum(p.numel() for p in plain(followed.config).parameters())
    for name, replicas in (("one", 1), ("four", 2)):
        results = json.loads((followed.run(name) / "results.json").read_text())
        assert results["parameters"] == parameters
        assert results["mfu"] is None
        assert results["sample"], "a model with logits has a sample"
        (start,) = metrics(followed.run(name), "start")
        expected = start["memory_expected_bytes"]
        assert set(expected) == {"parameters", "gradients", "optimizer"}
        assert expected["optimizer"] == results["optimizer_bytes"]["state"] == 2 * expected["parameters"] // replicas
        assert expected["gradients"] == expected["parameters"]
        said = next(outcome.out for line, outcome in followed.outcomes.items() if f"--run-dir runs/{name}" in line)
        assert "a dry run tells activations" in said
        assert f"({parameters:,})" in said
    described = json.loads((followed.weights / "config.json").read_text())
    assert not {"architectures", "model_type"} & set(described)
    keys = followed.config.model.model_dump()
    assert {key: described[key] for key in keys} == keys
    assert set(load_file(followed.weights / "model.safetensors")) == set(plain(followed.config).state_dict())


def plain(config: Config) -> nn.Module:
    from examples.own_model.plain import Decoder

    keys = config.model.model_dump(exclude={"family"}, exclude_none=True)
    made: nn.Module = Decoder(**keys)
    return made


def gradients_of_the_page(code: str, tensor: int, sequence: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """On this rank: the output of the page's layers, whole, and their canonical gradients."""
    scope: dict[str, Any] = {}
    exec(compile(code, "own-model-options.md", "exec"), scope)
    group = dense.mesh(tensor).tp
    options = {"group": group, "sequence_parallel_enabled": sequence}
    layers = nn.ModuleDict(
        {
            "embeddings": scope["Embeddings"](16, 8, 32, options),
            "attention": scope["Attention"]("attention", 32, 4, 2, options),
            "mlp": scope["GatedMLP"]("mlp", 32, 48, options),
            "scale": scope["Scale"](32, group, sequence),
        }
    )
    dense.fill(layers)
    x_SBH, dy_SBH = (
        whole.chunk(group.size)[group.rank] if sequence else whole
        for whole in (dense.random(seed, 8, 2, 32) for seed in (1, 2))
    )
    y_SBH = x_SBH + layers["embeddings"](torch.arange(16).view(8, 2))
    for name in ("attention", "mlp", "scale"):
        y_SBH = layers[name](y_SBH)
    y_SBH.backward(dy_SBH)
    whole = collectives.all_gather(y_SBH.detach(), group).view(8, 2, 32) if sequence else y_SBH.detach()
    return whole, gradients_of(layers)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "sequence"), [(2, False), (4, True)])
def test_the_layers_of_the_page_compute_the_same_at_any_degree(tensor: int, sequence: bool, ranks: Any) -> None:
    """With more ranks than key heads too."""
    code = (EXAMPLE / "parts.py").read_text(encoding="utf-8")
    wanted, gradients = gradients_of_the_page(code, 1, False)
    assert {"attention.k.weight", "attention.q_norm.weight", "attention.temperature", "scale.weight"} <= set(gradients)
    assert {"embeddings.positions.weight", "embeddings.norm.bias"} <= set(gradients)
    for y, found in dense.run(ranks, tensor, gradients_of_the_page, code, tensor, sequence):
        assert dense.error(y, wanted) < 1e-5
        assert set(found) == set(gradients)
        errors = {name: dense.error(found[name], gradients[name]) for name in gradients}
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.slow
def test_dropout_and_recompute_are_the_same_at_any_layout(followed: Followed) -> None:
    (followed.at / "optional.py").write_text(changed(SHARDED, blocks("diff", OPTIONAL)))
    overrides = ["model.family=optional:Decoder", "train.steps=4", "train.dropout_mode=invariant", "train.eval_every=4"]
    layouts = {"alone": [], "cut": ["train.recompute=full", "parallel.tensor=2", "parallel.sequence=true"]}
    losses = {}
    for name, keys in layouts.items():
        shardwise("train", RECIPE, *overrides, *keys, "--run-dir", f"runs/{name}", at=followed.at).succeeded()
        losses[name] = [record["loss"] for record in metrics(followed.run(name)) if "loss" in record]
    assert losses["cut"] == pytest.approx(losses["alone"], rel=1e-5)
    steps, without = ([record["loss"] for record in metrics(followed.run(name), "step")] for name in ("alone", "one"))
    assert steps[0] != pytest.approx(without[0], rel=1e-5), "nothing was dropped"
    start, first = (metrics(followed.run(name), "eval")[0]["loss"] for name in ("alone", "one"))
    assert start == pytest.approx(first, rel=1e-6), "an evaluation drops nothing"


def test_what_only_the_ranks_can_see_is_told_once(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "own_model")
    sharded = tmp_path / "examples/own_model/sharded.py"
    head = "sw.ParallelLMHead(hidden_size, vocab_size, **cut)"
    assert head in SHARDED
    sharded.write_text(SHARDED.replace(head, "nn.Linear(hidden_size, vocab_size)"))
    said = shardwise("train", RECIPE, "parallel.tensor=2", at=tmp_path).failed(2)
    text = "needs layers of shardwise, or shardwise.make_parameter, for head.weight and head.bias"
    assert said.count(text) == said.count("shardwise: ") == 1, said
    assert not [*(tmp_path / "runs").iterdir()], "a first start that is refused must leave no run behind"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zero1_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def reference() -> tuple[float, float]:
    """The example's model and data under torch.optim.AdamW, clipped at 1.0: loss before and after."""
    example = load()
    torch.manual_seed(0)
    model = example.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss_of(step: int) -> torch.Tensor:
        inputs, targets = example.make_batch(step)
        return torch.nn.functional.cross_entropy(model(inputs), targets)

    first = loss_of(example.STEPS).item()
    for step in range(example.STEPS):
        loss_of(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return first, loss_of(example.STEPS).item()


@pytest.mark.parametrize("size", few([1, 3], 1))
def test_trains_as_plain_adamw(size: int, tmp_path: Path) -> None:
    """The batch does not divide by 3."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"] if size > 1 else []
    first, wanted = reference()
    assert wanted < 0.9 * first, "the example does not learn, so its loss shows nothing"
    done = outcome(start(at=tmp_path, program=(sys.executable, *launcher, str(SCRIPT))), timeout=120)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if line.startswith("final loss")]
    assert len(lines) == 1, done.out
    assert float(lines[0].split()[-1]) == pytest.approx(wanted, rel=1e-5)
    assert "Warning" not in done.err, done.err
