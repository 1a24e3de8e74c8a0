"""A class of the user's own: where it is looked for, what it is given, and why one is refused."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise._torch_private import fake_tensors
from shardwise.config import Config, check_layout, config_from
from shardwise.errors import ConfigError, see
from shardwise.mesh import Group
from shardwise.models import build_model, check_own
from shardwise.placement import placements
from tests.unit.parallel.groups import pretend_group

HEAD = """
import torch
from torch import nn
import shardwise as sw

class Model(nn.Module):
"""
FORWARD = """
    def forward(self, ids_SB, targets_SB):
        return self.layer(ids_SB.float()).sum()
"""
PLAIN = """
    def __init__(self, vocab_size, width=4):
        super().__init__()
        self.layer = nn.Linear(3, width)
"""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module into the current directory, which no import path has; returns the family of its `Model`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def writer(constructor: str = PLAIN, forward: str = FORWARD, *, head: str = HEAD, path: str = "mine.py") -> str:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(head + textwrap.indent(textwrap.dedent(constructor + forward), "    "))
        return f"{path.removesuffix('.py').replace('/', '.')}:Model"

    yield writer
    for name in [name for name in set(sys.modules) - before if _lies_in(tmp_path, name)]:
        del sys.modules[name]


def _lies_in(folder: Path, module: str) -> bool:
    spec = getattr(sys.modules[module], "__spec__", None)
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
    return any(str(place).startswith(str(folder)) for place in places)


def config(family: str, sections: dict[str, dict[str, Any]] | None = None, **keys: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"family": family, "vocab_size": 16, **keys},
        "train": {"steps": 1, "global_batch": 4, "sequence_length": 4},
        "optimizer": {"lr": 1e-3},
    }
    for section, values in (sections or {}).items():
        base[section] = base.get(section, {}) | values
    return config_from(base)


def problems(chosen: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_own(chosen)
    return caught.value.problems


def problem(chosen: Config) -> str:
    (text,) = problems(chosen)
    return text


def build(chosen: Config, group: Group | None = None, **options: Any) -> nn.Module:
    return build_model(chosen, group or Group(), sequence_parallel=False, **options)


def unbuildable(chosen: Config, group: Group | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        build(chosen, group)
    (text,) = caught.value.problems
    return text


# ---- where it is looked for


@pytest.mark.parametrize("path", ["mine.py", "package/mine.py", "some/package/mine.py"])
def test_it_is_found_in_the_current_directory(path: str, write: Write) -> None:
    assert check_own(config(write(path=path))).__name__ == "Model"


def test_the_current_directory_stands_in_for_no_library_afterwards(write: Write, tmp_path: Path) -> None:
    family = write()
    before = list(sys.path)
    check_own(config(family))
    assert sys.path == [*before, str(tmp_path)], "what the module imports later must be found, after all else"
    check_own(config(family))
    assert sys.path == [*before, str(tmp_path)]


def test_the_current_directory_comes_before_installed_packages(write: Write, tmp_path: Path) -> None:
    write(path="installed/mine.py")
    sys.path.insert(0, str(tmp_path / "installed"))
    model_class = check_own(config(write()))
    assert sys.modules[model_class.__module__].__file__ == str(tmp_path / "mine.py")


@pytest.mark.parametrize(
    ("family", "missing"), [("nowhere:Model", "nowhere"), ("mine.nowhere:Model", "mine.nowhere"), ("a.b:C", "a")]
)
def test_a_module_that_is_missing(family: str, missing: str, write: Write, tmp_path: Path) -> None:
    write(path="mine/other.py")
    assert problem(config(family)) == (
        f"model.family ({family}): there is no module {missing} in {tmp_path} nor among the installed packages; "
        "start in the folder that holds it, or install it (docs/troubleshooting/runs.md#own-code-not-found)"
    )


def test_a_module_that_cannot_be_imported(write: Write, tmp_path: Path) -> None:
    where = f"({tmp_path / 'mine.py'}, line 3)"
    said = problem(config(write(head="\n\nimport no_such_package\nclass Model:\n")))
    assert said == (
        "model.family (mine:Model) cannot be imported: ModuleNotFoundError: No module named 'no_such_package' "
        f"{where}{see('runs#own-code-fails')}"
    )
    said = problem(config(write(head="\n\nraise OSError('no disk')\nclass Model:\n", path="failing.py")))
    assert f"cannot be imported: OSError: no disk ({tmp_path / 'failing.py'}, line 3) " in said
    said = problem(config(write(head="def broken(:\nclass Model:\n", path="broken.py")))
    assert "cannot be imported: SyntaxError" in said
    assert "(broken.py, line 1)" in said


def test_a_class_that_is_missing(write: Write, tmp_path: Path) -> None:
    write()
    assert problem(config("mine:Modle")) == (
        f"model.family (mine:Modle): {tmp_path / 'mine.py'} lacks Modle; did you mean Model?"
    )


@pytest.mark.parametrize("code", ["def Model():\n    pass\n", "class Model:\n    pass\n", "Model = 3\n"])
def test_what_is_no_module(code: str, write: Write, tmp_path: Path) -> None:
    assert problem(config(write("", "", head=code))) == (
        f"model.family (mine:Model): {tmp_path / 'mine.py'}: Model must be a class derived from torch.nn.Module"
    )


# ---- what it is given


ALL_OF_IT = """
    def __init__(self, vocab_size, depth, *, group, sequence_parallel, recompute, seed, device, dtype, rope=None):
        super().__init__()
        self.layer = nn.Linear(3, vocab_size, device=device, dtype=dtype)
        self.given = (depth, group, sequence_parallel, recompute, seed, device, dtype, rope)
"""


def test_keys_become_keywords_and_the_run_adds_what_is_named(write: Write) -> None:
    sections = {"train": {"recompute": "full", "seed": 5}}
    group = Group()
    rope = {"base": 1e4, "kind": ["a", "b"]}
    built = build(config(write(ALL_OF_IT), sections, depth=3, rope=rope), group, device="cpu", dtype=torch.bfloat16)
    assert built.given == (3, group, False, "full", 5, "cpu", torch.bfloat16, rope)


def test_sizes_that_the_layout_is_held_to_need_no_taker(write: Write) -> None:
    sizes = {"max_position_embeddings": 8, "num_attention_heads": 4, "intermediate_size": None}
    assert isinstance(build(config(write(), **sizes)), nn.Module)
    with pytest.raises(ConfigError, match=r"train.sequence_length \(4\) must be at most"):
        check_layout(config(write(), max_position_embeddings=3), 1)


def test_a_constructor_may_take_everything(write: Write) -> None:
    takes_all = """
    def __init__(self, **given):
        super().__init__()
        self.layer, self.given = nn.Linear(3, 3), given
    """
    built = build(config(write(takes_all), depth=3), dtype=torch.bfloat16)
    assert built.given == {"vocab_size": 16, "depth": 3}, "of the run it is given what it names"
    assert built.layer.weight.dtype == torch.bfloat16
    sections = {"parallel": {"tensor": 2}, "train": {"recompute": "full"}}
    assert [text.split()[0] for text in problems(config("mine:Model", sections))] == [
        "parallel.tensor", "train.recompute"
    ]  # fmt: skip


def test_what_a_constructor_passes_on_its_base_takes(write: Write) -> None:
    base = """
class Base(nn.Module):
    def __init__(self, width, recompute, group=None):
        super().__init__()
        self.layer, self.group = nn.Linear(3, width), group

class Model(Base):
"""
    passes_on = """
    def __init__(self, depth=1, **kwargs):
        super().__init__(kwargs.pop("vocab_size"), **kwargs)
        self.depth = depth
    """
    group = Group()
    built = build(config(write(passes_on, head=HEAD.partition("class")[0] + base), depth=2), group)
    assert (built.depth, built.group) == (2, group)
    assert built.layer.weight.shape == (16, 3)


def test_a_mixin_without_a_constructor_is_passed_over(write: Write) -> None:
    base = """
class Mixin:
    pass

class Base(nn.Module):
    def __init__(self, recompute, vocab_size):
        super().__init__()
        self.layer, self.recompute = nn.Linear(3, 3), recompute

class Model(Mixin, Base):
"""
    passes_on = """
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
    """
    assert build(config(write(passes_on, head=HEAD.partition("class")[0] + base))).recompute == "none"


def test_a_key_beside_the_one_that_was_meant_is_reported_with_it(write: Write) -> None:
    assert problem(config(write(), width=4, widht=3)) == (
        "model.widht: mine:Model takes no such argument; did you mean model.width?"
    )


def test_a_misspelt_key_is_reported_as_far_as_names_are_known(write: Write) -> None:
    """Of `**kwargs` nobody knows the names: what is like none of the others is passed on."""
    takes_all = """
    def __init__(self, vocab_size, width=4, **kwargs):
        super().__init__()
        self.layer, self.given = nn.Linear(3, width), kwargs
    """
    chosen = config(write(takes_all), widht=3, color="red")
    assert problem(chosen) == "model.widht: mine:Model names no such argument; did you mean model.width?"
    assert build(config("mine:Model", widht=3, width=5, color="red")).given == {"color": "red", "widht": 3}


def test_a_constructor_may_take_the_section(write: Write) -> None:
    takes_config = """
    def __init__(self, config, group=None):
        super().__init__()
        self.layer, self.group = nn.Linear(config.vocab_size, config.depth), group
    """
    group = Group()
    built = build(config(write(takes_config), depth=3), group)
    assert built.layer.weight.shape == (3, 16)
    assert built.group is group
    said = unbuildable(config("mine:Model"))
    assert "cannot be built: AttributeError: 'OwnConfig' object has no attribute 'depth'" in said


def test_the_runs_seed_decides_the_weights(write: Write) -> None:
    family = write()

    def weight(seed: int) -> torch.Tensor:
        return next(build(config(family, {"train": {"seed": seed}})).parameters()).detach()

    first = weight(1)
    torch.randn(3)
    assert torch.equal(weight(1), first)
    assert not torch.equal(weight(2), first)


def test_a_model_that_takes_no_dtype_is_converted(write: Write) -> None:
    built = build(config(write()), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}
    assert all(parameter.is_meta for parameter in build(config("mine:Model"), device="meta").parameters())


def test_a_model_without_data_is_converted(write: Write) -> None:
    """As `shardwise compile --capture-only` makes it; torch's own conversion of such tensors fails."""
    constructor = """
    def __init__(self, vocab_size):
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.layer.weight
        self.register_buffer("places", torch.arange(3), persistent=False)
    """
    with fake_tensors():
        model = build(config(write(constructor)), device="cpu", dtype=torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert len(list(model.parameters())) == 3
    assert model.get_buffer("places").dtype == torch.int64


def test_layers_without_names_have_those_of_their_paths(write: Write) -> None:
    sharded = """
    def __init__(self, vocab_size, group=None):
        super().__init__()
        self.qkv = sw.GQAQKVColumnParallelLinear(8, (8, 4), head_dim=4, group=group)
        self.layer = sw.RowParallelLinear(3, 3, group=group)
    """
    record = {piece.name: piece.shape for _, _, r in placements(build(config(write(sharded)))) for piece in r.pieces}
    assert record == {"qkv.weight": (16, 8), "qkv.bias": (16,), "layer.weight": (3, 3), "layer.bias": (3,)}


# ---- what is said of one that cannot be trained


def test_keys_that_nobody_takes_and_keys_that_are_missing(write: Write) -> None:
    takes_some = """
    def __init__(self, vocab_size, depth, width, group=None):
        super().__init__()
    """
    assert problems(config(write(takes_some), widht=3, color="red", device="cpu")) == [
        "model.device: the run itself gives device to mine:Model: rename it",
        "model.color: mine:Model takes no such argument; it takes vocab_size, depth and width",
        "model.widht: mine:Model takes no such argument; did you mean model.width?",
        "model.depth is missing (an argument of mine:Model)",
        "model.width is missing (an argument of mine:Model)",
    ]


def test_what_a_layout_asks_for_must_be_an_argument(write: Write) -> None:
    sections = {"parallel": {"tensor": 2, "sequence": True}, "train": {"recompute": "selective"}}
    assert problems(config(write(), sections)) == [
        "parallel.tensor (2) must be 1: mine:Model takes no argument group",
        "parallel.sequence (true) must be false: mine:Model takes no argument sequence_parallel",
        "train.recompute (selective) must be none: mine:Model takes no argument recompute",
    ]
    alone = {"parallel": {"tensor": 1, "sequence": True}}
    assert check_own(config("mine:Model", alone)), "sequence parallelism has no effect at TP 1"


@pytest.mark.parametrize(
    ("forward", "shown"),
    [
        ("def forward(self, ids, targets):\n    pass", "ids, targets"),
        ("def forward(self, ids_SB, /, targets_SB):\n    pass", "ids_SB, targets_SB"),
        ("def forward(self, ids_SB, targets_SB, mask):\n    pass", "ids_SB, targets_SB, mask"),
        ("def logits(self, ids_SB):\n    pass", "input"),
    ],
)
def test_forward_takes_the_batch_and_needs_no_more(forward: str, shown: str, write: Write) -> None:
    assert problem(config(write(PLAIN, "    " + forward.replace("\n", "\n    ")))) == (
        f"model.family (mine:Model): forward({shown}) must take ids_SB and targets_SB and need no other argument; "
        "dropout it may take"
    )


@pytest.mark.parametrize(
    "parameters", ["ids_SB, targets_SB, dropout", "*, targets_SB, ids_SB, dropout=None", "ids_SB, mask=None, **rest"]
)
def test_forward_may_take_more(parameters: str, write: Write) -> None:
    assert check_own(config(write(PLAIN, f"    def forward(self, {parameters}):\n        pass")))


@pytest.mark.parametrize(
    "forward",
    [
        "def forward(module, ids_SB, targets_SB):",
        "def forward(*everything, ids_SB, targets_SB):",
        "@staticmethod\n    def forward(ids_SB, targets_SB):",
        "@classmethod\n    def forward(cls, ids_SB, targets_SB):",
    ],
)
def test_the_argument_of_forward_that_receives_the_model_may_have_any_name(forward: str, write: Write) -> None:
    assert check_own(config(write(PLAIN, f"    {forward}\n        pass")))


def test_a_message_shows_forward_without_the_argument_that_receives_the_model(write: Write) -> None:
    takes = "def forward(module, ids_SB, self):\n        pass"
    assert problem(config(write(PLAIN, f"    {takes}"))) == (
        "model.family (mine:Model): forward(ids_SB, self) must take ids_SB and targets_SB and need no other "
        "argument; dropout it may take"
    )


RESETS = {"data": {"reset_position_ids": True, "reset_attention_mask": True}}


def test_forward_may_take_what_the_data_section_asks_for(write: Write) -> None:
    takes = "def forward(self, ids_SB, targets_SB, positions_SB, starts_SB):\n        pass"
    assert check_own(config(write(PLAIN, f"    {takes}"), RESETS))


def test_forward_must_take_what_the_data_section_asks_for(write: Write) -> None:
    takes = "def forward(self, ids_SB, targets_SB):\n        pass"
    assert problem(config(write(PLAIN, f"    {takes}"), RESETS)) == (
        "model.family (mine:Model): forward(ids_SB, targets_SB) must take ids_SB, targets_SB, positions_SB and "
        "starts_SB and need no other argument; dropout it may take"
    )


def test_all_is_told_at_once(write: Write) -> None:
    found = problems(
        config(write(PLAIN, "    def forward(self, x):\n        pass"), {"parallel": {"tensor": 2}}, depth=1)
    )
    assert [text.split()[0] for text in found] == ["model.depth:", "parallel.tensor", "model.family"]


def test_a_constructor_that_raises_is_told_with_the_users_own_line(write: Write, tmp_path: Path) -> None:
    failing = """
    def __init__(self, vocab_size):
        super().__init__()
        self.layer = sw.GQAQKVColumnParallelLinear(8, (6, 4), head_dim=4)
    """
    assert unbuildable(config(write(failing))) == (
        "model.family (mine:Model) cannot be built: ValueError: query size (6) must be a multiple of head_dim (4) "
        f"({tmp_path / 'mine.py'}, line 10){see('runs#own-code-fails')}"
    )


@pytest.mark.parametrize("layers", ["pass", "self.layer = nn.Linear(2, 2).requires_grad_(False)"])
def test_a_model_without_parameters(layers: str, write: Write) -> None:
    empty = f"""
    def __init__(self, vocab_size):
        super().__init__()
        {layers}
    """
    assert unbuildable(config(write(empty))) == (
        "model.family (mine:Model): the number of trainable parameters (0) must be at least 1"
    )


def test_under_tensor_parallelism_every_parameter_says_what_it_is_a_part_of(write: Write) -> None:
    """Two ranks would train their own `nn.Linear` on their own gradients, and nobody would see it."""
    whole = """
    def __init__(self, vocab_size, group=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    """
    family = write(whole)
    assert unbuildable(config(family), pretend_group(0, 2)) == (
        "model.family (mine:Model): parallel.tensor (2) needs layers of shardwise, or shardwise.make_parameter, for "
        "layers.0.weight, layers.0.bias, layers.1.weight, layers.1.bias and 2 more: nothing says which part of them a "
        "rank holds"
    )
    assert isinstance(build(config(family)), nn.Module), "alone they are whole"


def test_dropout_of_torch_is_refused_under_tensor_parallelism(write: Write) -> None:
    dropping = """
    def __init__(self, vocab_size, group=None):
        super().__init__()
        self.layer = sw.RMSNorm(3, group=group, seed=1, name="layer")
        self.drop = nn.ModuleList(nn.Dropout(p) for p in (0.1, 0.0, 0.2))
    """
    family = write(dropping)
    assert unbuildable(config(family), pretend_group(0, 2)) == (
        "model.family (mine:Model): parallel.tensor (2) needs shardwise.Dropout in place of torch.nn.Dropout for "
        "drop.0 and drop.2, which would drop the same elements of each rank's part"
    )
    assert isinstance(build(config(family)), nn.Module), "alone it has the whole of each activation"


def test_a_layer_without_the_group_is_refused_under_tensor_parallelism(write: Write) -> None:
    """It would train, and no checkpoint of it could be saved."""
    family = write("""
    def __init__(self, vocab_size, group=None):
        super().__init__()
        self.norm = sw.RMSNorm(3)
        self.last = sw.RMSNorm(3, group=group, seed=1, name="last")
""")
    assert unbuildable(config(family), pretend_group(0, 2)) == (
        "model.family (mine:Model): parallel.tensor (2) needs group=group, which the constructor is given, in the "
        "layers of norm.weight: they were made without it"
    )
    assert isinstance(build(config(family)), nn.Module)


def test_dropout_without_its_key_or_a_place_of_its_own_is_refused(write: Write) -> None:
    dropping = """
    def __init__(self, vocab_size):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.drop = nn.ModuleList(sw.Dropout(p, layer=0, site=s) for p, s in ((0.1, 0), (0.0, 0), (0.2, 1), (0.2, 1)))
    """
    with pytest.raises(ConfigError) as caught:
        build(config(write(dropping)))
    assert caught.value.problems == [
        "model.family (mine:Model): forward must take dropout, the step's key, and give it to drop.0, drop.2 and "
        "drop.3, which drop nothing without it",
        "model.family (mine:Model): drop.2 and drop.3 must have a layer and a site of their own, or they draw one mask",
    ]


def test_two_parameters_of_one_name_would_be_saved_once(write: Write) -> None:
    same = """
    def __init__(self, vocab_size):
        super().__init__()
        self.a = sw.ColumnParallelLinear(3, 3, name="a")
        self.b = sw.ColumnParallelLinear(3, 3, name="a")
    """
    assert unbuildable(config(write(same))) == (
        "model.family (mine:Model): several parameters have the name a.weight and a.bias: give their layers other names"
    )


def test_a_tied_weight_is_one_parameter(write: Write) -> None:
    tied = """
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = sw.ParallelEmbedding(vocab_size, 4)
        self.head = sw.ParallelLMHead(4, vocab_size, tied_weight=self.embedding.weight)
    """
    assert [name for name, _ in build(config(write(tied))).named_parameters()] == ["embedding.weight"]


def test_buffers_that_the_final_weights_would_lose(write: Write) -> None:
    family = write("""
    def __init__(self, vocab_size):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.ones(3), persistent=False)
""")
    said = unbuildable(config(family))
    assert "norm.running_mean, norm.running_var and norm.num_batches_tracked would be lost" in said
