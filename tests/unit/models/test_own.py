"""A class of the user's own: where it is looked for, what it is given, and why one is refused."""

import re
import sys
from pathlib import Path

import pytest
import torch

from shardwise.distributed.mesh import Group
from shardwise.distributed.torch_private import fake_tensors
from shardwise.models.user_model import check_user_model
from tests.rows import rows_of
from tests.unit.models.own_classes import PLAIN, Write, build, config, problem, problems, unbuildable

ROWS = rows_of(__file__)


@pytest.mark.parametrize("path", ["mine.py", "package/mine.py", "some/package/mine.py"])
def test_it_is_found_in_the_current_directory(path: str, write: Write, tmp_path: Path) -> None:
    """Which stands in for no library afterwards: what the module imports later must be found, after all else."""
    family, before = write(path=path), list(sys.path)
    for _ in range(2):
        assert check_user_model(config(family)).__name__ == "Model"
        assert sys.path == [*before, str(tmp_path)]


@pytest.mark.parametrize(
    ("family", "head", "said"),
    ROWS["not_found"],
)
def test_a_class_that_cannot_be_found(family: str, head: str | None, said: str, write: Write) -> None:
    write(path="mine/other.py" if "nowhere" in family else "mine.py")
    if head is not None:
        write("", "", head=head, path="failing.py")
    assert re.search(rf"model\.family \({family}\).*{said}", problem(config(family)))


def constructor(arguments: str, *lines: str) -> str:
    """Of a class, which takes these arguments and makes a layer."""
    body = ("super().__init__()", "self.layer = nn.Linear(3, 3)", *lines)
    return f"\n    def __init__(self, {arguments}):\n" + "".join(f"        {line}\n" for line in body)


def test_keys_become_keywords_and_the_run_adds_what_is_named(write: Write) -> None:
    arguments = "depth, *, vocab_size, group, sequence_parallel, recompute, seed, device, dtype, rope=None"
    given = "self.given = (depth, group, sequence_parallel, recompute, seed, device, dtype, rope)"
    sections = {"train": {"recompute": "full", "seed": 5}}
    group = Group()
    rope = {"base": 1e4, "kind": ["a", "b"]}
    chosen = config(write(constructor(arguments, given)), sections, depth=3, rope=rope)
    built = build(chosen, group, device="cpu", dtype=torch.bfloat16)
    assert built.given == (3, group, False, "full", 5, "cpu", torch.bfloat16, rope)
    # As `shardwise compile --capture-only` makes it; torch's own conversion of such tensors fails.
    tied = ("self.head = nn.Linear(3, 3)", "self.head.weight = self.layer.weight")
    buffer = 'self.register_buffer("places", torch.arange(3), persistent=False)'
    with fake_tensors():
        model = build(
            config(write(constructor("vocab_size", *tied, buffer), path="tied.py")), device="cpu", dtype=torch.bfloat16
        )
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert len(list(model.parameters())) == 3
    assert model.get_buffer("places").dtype == torch.int64


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
    assert "cannot be built: AttributeError: 'UserModelConfig' object has no attribute 'depth'" in said


def test_keys_that_nobody_takes_and_keys_that_are_missing(write: Write) -> None:
    family = write(constructor("vocab_size, depth, width, group=None"))
    assert problems(config(family, widht=3, color="red", device="cpu")) == [
        "model.device: the run itself gives device to mine:Model: rename it",
        "model.color: mine:Model takes no such argument; it takes vocab_size, depth and width",
        "model.widht: mine:Model takes no such argument; did you mean model.width?",
        "model.depth is missing (an argument of mine:Model)",
        "model.width is missing (an argument of mine:Model)",
    ]


def test_what_a_layout_and_the_data_ask_for_must_be_arguments(write: Write) -> None:
    sections = {"parallel": {"tensor": 2, "sequence": True}, "train": {"recompute": "selective"}}
    assert problems(config(write(), sections)) == [
        "parallel.tensor (2) must be 1: mine:Model takes no argument group (docs/own-model.md)",
        "parallel.sequence (true) must be false: mine:Model takes no argument sequence_parallel (docs/own-model.md)",
        "train.recompute (selective) must be none: mine:Model takes no argument recompute (docs/own-model.md)",
    ]
    alone = {"parallel": {"tensor": 1, "sequence": True}}
    assert check_user_model(config("mine:Model", alone)), "sequence parallelism has no effect at TP 1"
    takes = "def forward(self, ids, targets, positions_SB, starts_SB):\n        pass"
    assert check_user_model(config(write(PLAIN, f"    {takes}", path="taking.py"), RESETS))
    family = write(PLAIN, "    def forward(self, ids, targets):\n        pass", path="lacking.py")
    without = write(PLAIN, "    def logits(self, ids):\n        pass", path="without.py")
    assert problem(config(without)) == f"model.family ({without}) must have a method forward(ids, targets)"
    assert ", and positions_SB and starts_SB by name; every other" in problem(config(family, RESETS))


RESETS = {"data": {"reset_position_ids": True, "reset_attention_mask": True}}


@pytest.mark.parametrize(
    ("parameters", "said"),
    ROWS["forward"],
)
def test_forward_takes_the_batch_and_needs_no_more(parameters: str, said: str, write: Write) -> None:
    family = write(PLAIN, f"    def forward({parameters}):\n        pass")
    assert problem(config(family)).startswith(f"model.family (mine:Model): forward({said}")
