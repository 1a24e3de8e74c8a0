"""torchtitan's and OLMo-core's names, written by torch's own writer: weights, moments, keys, and what is refused."""

import copy
import functools
import json
import operator
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwise.checkpoint.storage.root import Root
from shardwise_use.importing.imported_model import ImportedModel, ImportedProgress, write_imported_checkpoint
from shardwise_use.importing.olmo_core import _schedule, open_olmo_core
from shardwise_use.importing.torch_dcp import DcpFolder
from shardwise_use.importing.torchtitan import open_torchtitan
from tests.command_line import CommandLine
from tests.hugging_face import save
from tests.unit.use.importing.checks import assert_equal, problems, states_of
from tests.unit.use.importing.megatron_shards import OTHERS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FULL = {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}
GROUP = {"lr": 1e-4, "initial_lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TITAN, OLMO = OTHERS["titan"], OTHERS["olmo"]


def named(weights: Mapping[str, Tensor], rules: Mapping[str, str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        other = name
        for pattern, replacement in rules.items():
            other = re.sub(pattern, replacement, other)
        found[other] = tensor
    return found


def in_pairs(tensors: dict[str, Tensor], heads: Mapping[str, int]) -> dict[str, Tensor]:
    """Rows of queries and keys as their heads are rotated in neighbouring pairs."""
    for name, tensor in tensors.items():
        if count := next((count for end, count in heads.items() if end in name), 0):
            tensors[name] = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return tensors


def fused(tensors: dict[str, Tensor], kv_heads: int) -> dict[str, Tensor]:
    """The moments of a projection to queries, keys and values as one: the heads of a group below each other."""
    for name in [name for name in tensors if ".wq." in name]:
        parts = [tensors.pop(name.replace(".wq.", f".w{letter}.")).unflatten(0, (kv_heads, -1)) for letter in "qkv"]
        tensors[name.replace(".wq.", ".wqkv.")] = torch.cat(parts, 1).flatten(0, 1)
    return tensors


def state(moments: Mapping[str, Tensor], step: int, no_decay: str = "") -> dict[str, Any]:
    held: dict[str, Any] = {}
    for name, tensor in moments.items():
        held |= {f"state.{name}.exp_avg": tensor, f"state.{name}.exp_avg_sq": tensor**2}
        held[f"state.{name}.step"] = torch.tensor(float(step))
        for key, value in GROUP.items():
            held[f"param_groups.{name}.{key}"] = 0.0 if key == "weight_decay" and name == no_decay else value
    return held


def write(state: Mapping[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)


def titan(case: str, folder: Path, **fields: Any) -> dict[str, Tensor]:
    """A checkpoint of torchtitan in `step-3` beside config.json; what the weights are here."""
    model = save(case, folder, **fields)
    weights = load_file(folder / "model.safetensors")
    there = named(weights, TITAN)
    if case == "llama":
        there = in_pairs(there, {".wq.": 4, ".wk.": 2})
    for name in [name for name in there if ".experts.0." in name]:
        layer, kind = re.fullmatch(r"(layers\.\d+\.)mlp\.experts\.0\.(\w+)_proj\.weight", name).groups()
        ours = f"model.{layer}mlp.experts.{{}}.{kind}_proj.weight"
        number = {"gate": "w1_EFD", "down": "w2_EDF", "up": "w3_EFD"}[kind]
        stacked = torch.stack([weights[ours.format(expert)] for expert in range(4)])
        there[f"{layer}moe.routed_experts.inner_experts.{number}"] = stacked
        there[f"{layer}moe.expert_bias_E"] = torch.zeros(4)
    there = {name: tensor for name, tensor in there.items() if ".mlp.experts." not in name}
    trained = {name: tensor for name, tensor in there.items() if "expert_bias" not in name}
    other = {f"optimizer.{name}": value for name, value in state(fused(trained, 2), 3).items()}
    other |= {
        "train_state.step": 3, "train_state.ntokens_seen": 50, "lr_scheduler.last_epoch": 3,
        "dataloader.world_size": 2, "dataloader.dp_rank_0": pickle.dumps({"anything": 1}),
    }  # fmt: skip
    if model.config.tie_word_embeddings:
        there["lm_head.weight"] = there["tok_embeddings.weight"].clone()
    write({**there, **other}, folder / "step-3")
    write(there, folder / "step-1")
    return weights


def olmo_fields(**changes: Any) -> dict[str, Any]:
    """The configuration that lies beside a checkpoint, with other values at some paths."""
    fields = copy.deepcopy(OTHERS["olmo config"])
    for path, value in changes.items():
        *parents, last = path.split(".")
        functools.reduce(operator.getitem, parents, fields)[last] = value
    return fields


def olmo(folder: Path) -> dict[str, Tensor]:
    """A checkpoint of OLMo-core of an OLMo 2 in `step3`; what the weights are here."""
    save("olmo2", folder / "hf", rms_norm_eps=1e-6)
    weights = load_file(folder / "hf" / "model.safetensors")
    there = named(weights, OLMO)
    optimizer = {f"optim.{name}": value for name, value in state(there, 4, "embeddings.weight").items()}
    step = folder / "step3"
    write({f"model.{name}": tensor for name, tensor in there.items()} | optimizer, step / "model_and_optim")
    (step / "train").mkdir()
    trained = {"global_step": 3, "global_train_tokens_seen": 3 * 2 * 24, "max_steps": 20, "rng": {}}
    torch.save(trained, step / "train" / "rank0.pt")
    (step / "config.json").write_text(json.dumps(olmo_fields()))
    return weights


def assert_is(opened: ImportedModel, weights: Mapping[str, Tensor], folder: Path) -> ImportedProgress:
    """The weights and moments of a checkpoint to the bit, once it is written."""
    found = states_of(opened)
    assert_equal(found["model"], weights)
    assert_equal(found["exp_avg"], weights)
    assert_equal(found["exp_avg_sq"], {name: weight**2 for name, weight in weights.items()})
    write_imported_checkpoint(opened, Root.of(folder))
    return opened.progress


def refusal(action: Callable[..., object], *arguments: Any) -> str:
    return "\n".join(problems(action, *arguments))


@pytest.mark.parametrize(
    ("case", "fields"), [("llama", {}), ("qwen3", FULL | {"tie_word_embeddings": True}), ("qwen3_moe", {})]
)
def test_torchtitan(tmp_path: Path, case: str, fields: dict[str, Any]) -> None:
    weights = titan(case, tmp_path, **fields)
    opened = open_torchtitan(tmp_path, tmp_path)  # the newest step
    progress = assert_is(opened, weights, tmp_path / "ours")
    assert (progress.step, progress.tokens, progress.samples, progress.updates) == (3, 100, None, 3)
    assert progress.keys == {
        "optimizer.lr": 1e-3, "optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1,
        "optimizer.no_decay": [],
    }  # fmt: skip
    alone = open_torchtitan(tmp_path / "step-1", tmp_path / "config.json")
    assert alone.progress is None
    assert "has weights alone" in alone.notes[0]
    assert open_torchtitan(tmp_path, tmp_path, weights_only=True).progress is None


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All tensors of a checkpoint of torch, and its objects but those of the data loader."""
    found = DcpFolder.open(folder)
    objects = {name: found.object(name) for name in found.objects if not name.startswith("dataloader")}
    return {name: tensor.read() for name, tensor in found.tensors.items()}, objects


def test_torchtitan_before_0_3(tmp_path: Path) -> None:
    """Its names were shorter, and its moments those of single projections."""
    weights = titan("llama", tmp_path)
    tensors, objects = stored(tmp_path / "step-3")
    apart = {name: tensor for name, tensor in tensors.items() if "wqkv" not in name}
    for name in [name for name in tensors if re.fullmatch(r"layers.*\.w[qkv]\.weight", name)]:
        for key, value in state({name: tensors[name]}, 3).items():
            apart[f"optimizer.{key}"] = value
    older = {
        name.replace("qkv_linear.", "").replace("lm_head.", "output."): value
        for name, value in {**apart, **objects}.items()
        if "wqkv" not in name
    }
    write(older, tmp_path / "older")
    assert_is(open_torchtitan(tmp_path / "older", tmp_path), weights, tmp_path / "ours")


def test_olmo_core(tmp_path: Path) -> None:
    weights = olmo(tmp_path)
    opened = open_olmo_core(tmp_path)
    progress = assert_is(opened, weights, tmp_path / "ours")
    assert (progress.step, progress.tokens, progress.samples, progress.updates) == (3, 144, 6, 4)
    assert progress.keys == {
        "optimizer.lr": 1e-3, "optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1,
        "optimizer.no_decay": ["model.embed_tokens.weight"], "optimizer.max_norm": 0.5, "optimizer.schedule": "points",
        "optimizer.points": [
            {"at": 0, "factor": 0.0, "shape": "linear"}, {"at": 2, "factor": 1.0, "shape": "linear"},
            {"at": 16, "factor": 1.0, "shape": "linear"}, {"at": 20, "factor": 0.1, "shape": "linear"},
        ],
        "train.sequence_length": 24, "train.global_batch": 2, "train.steps": 20,
    }  # fmt: skip
    assert ["SkipStepAdamW" in note or "z_loss_multiplier" in note for note in opened.notes] == [True, True]
    assert open_olmo_core(tmp_path / "step3" / "model_and_optim", weights_only=True).progress is None
    # OLMo-core 3.0.0 warms up to the end, and the rate then falls into the midst of the decay.
    scheduler = {"_CLASS_": "olmo_core.optim.scheduler.WSD", "warmup": 16, "decay": 4}
    assert _schedule(scheduler, 1e-3, 20)[0]["optimizer.schedule"] == "points"
    keys, notes = _schedule({**scheduler, "decay": 5}, 1e-3, 20)
    assert keys == {}
    assert notes[0].startswith("WSD begins to decay before its warmup (16 steps) ends")


def test_models_of_olmo_core(tmp_path: Path) -> None:
    """What config.json says of the model: windows, scaling, and what no family here has."""
    olmo(tmp_path)
    file = tmp_path / "step3" / "config.json"

    def opened(**changes: Any) -> Any:
        file.write_text(json.dumps(olmo_fields(**changes)))
        return open_olmo_core(tmp_path).config

    mixer = "model.block.sequence_mixer"
    free = {f"force_full_attention_on_{end}_layer": False for end in ("first", "last")}
    window = {"pattern": [3, -1], **free}
    yarn = {"_CLASS_": "olmo_core.nn.rope.YaRNRoPEScalingConfig", "factor": 4.0, "old_context_len": 24}
    yarn |= {"beta_fast": 32, "beta_slow": 1}
    config = opened(**{f"{mixer}.sliding_window": window, "train_module.max_sequence_length": 96})
    assert (config.family, config.sliding_window, config.max_position_embeddings) == ("olmo3", 3, 96)
    assert config.layer_types == ("sliding_attention", "full_attention")
    scaled = opened(**{f"{mixer}.rope.scaling": yarn, "train_module.max_sequence_length": 96})
    assert scaled.rope_scaling["factor"] == 4.0
    for path, value, reason in (
        (f"{mixer}.clip_qkv", 8.0, "clip_qkv (8.0) must be None"),
        ("model.block.name", "peri_norm", "name ('peri_norm') must be 'default' or 'reordered_norm'"),
        ("model.name", "moe", "model.name ('moe') must be 'default'"),
        (f"{mixer}.qk_norm", None, "no family here has blocks 'reordered_norm' with norms of queries and keys none"),
        ("train_module.max_sequence_length", None, "is no configuration as OLMo-core writes it"),
        ("train_module.optim.step_increment_bugfix", False, "does not count its updates"),
        (f"{mixer}.sliding_window", {"pattern": [3, 5], **free}, "windows [3, 5]"),
    ):
        said = refusal(lambda: opened(**{path: value}))  # noqa: B023
        assert reason in said, path
        assert "ConfigError" not in said, path
    file.write_text("{")
    assert "cannot be read" in refusal(open_olmo_core, tmp_path)


def test_what_torchtitan_has_more_is_named(tmp_path: Path) -> None:
    titan("llama", tmp_path)
    tensors, objects = stored(tmp_path / "step-3")

    def told(name: str, value: Any) -> str:
        held = {**tensors, **objects, name: value}
        write({each: kept for each, kept in held.items() if kept is not None}, tmp_path / name)
        return refusal(open_torchtitan, tmp_path / name, tmp_path)

    lora = "layers.0.attention.wo.lora_a.weight"
    for name, value, text in (
        (lora, torch.zeros(2, 2), f"has adapters ({lora})"),
        ("more.weight", torch.zeros(3), "has more.weight [3], which the model lacks"),
        ("norm.weight", None, "lacks model.norm.weight [32]"),
        ("optimizer.param_groups.norm.weight.initial_lr", 0.5, "initial_lr must be the same for all weights"),
        ("optimizer.param_groups.norm.weight.weight_decay", 0.5, "weight_decay must be one rate"),
        ("train_state.step", None, "train_state.step, and has None"),
    ):
        assert text in told(name, value)


def test_the_command(tmp_path: Path, cli: CommandLine) -> None:
    olmo(tmp_path)
    titan("llama", tmp_path / "titan")
    told = cli("checkpoint", "import", tmp_path, tmp_path / "run", "--from", "olmo-core").out
    assert "after step 3, 6 samples and 144 tokens" in told
    assert (tmp_path / "run" / "imported.yaml").exists()
    from_titan = ["checkpoint", "import", tmp_path / "titan", tmp_path / "other", "--from", "torchtitan"]
    for words, reason in (
        ([], "--from torchtitan needs --config PATH"),
        (["--config", tmp_path / "titan"], "give --samples N"),
        (["--config", tmp_path / "none", "--samples", "6"], "none"),
    ):
        assert reason in cli.refused(*from_titan, *words)
    said = cli(*from_titan, "--config", tmp_path / "titan", "--samples", "6").out
    assert "after step 3, 6 samples and 100 tokens" in said
