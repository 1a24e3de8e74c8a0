"""What `train.switches` does not go with."""

import pytest

from tests.unit.config.refusals import problem, problems

IN_BACKWARD = ("train.switches=[update_in_backward]", "optimizer.max_norm=null")
FLASH = ("train.switches=[flash_attention_3]", "precision.mode=mixed")
GRAPHS = ("train.switches=[cuda_graphs]",)


@pytest.mark.parametrize(
    ("world", "overrides", "told"),
    [
        (1, IN_BACKWARD[:1], "optimizer.max_norm (1.0), which needs all gradients first"),
        (1, (*IN_BACKWARD, "hooks.optimizer=torch.optim:SGD"), "hooks.optimizer (torch.optim:SGD)"),
        (2, (*IN_BACKWARD, "optimizer.zero=2"), "optimizer.zero (2), which reduces in each micro-batch"),
        (1, (*GRAPHS, "data.reset_attention_mask=true"), "data.reset_attention_mask (true)"),
        (1, (*GRAPHS, "train.bitwise=true"), "train.bitwise (true)"),
        (2, (*GRAPHS, "optimizer.zero=3"), "optimizer.zero (3), which communicates in each pass"),
        (1, (*GRAPHS, "model.attention_dropout=0.1"), "model.attention_dropout (0.1)"),
        (
            2,
            (*GRAPHS, "train.global_batch=4", "train.micro_batch=2"),
            "train.global_batch (4), a rank's one micro-batch",
        ),
        (1, (*FLASH, "precision.mode=float32"), "precision.mode (float32), as its kernels take 16-bit numbers"),
        (2, (*GRAPHS, "parallel.tensor=2"), "parallel.tensor (2)"),
    ],
)
def test_what_does_not_go_with_a_switch(world: int, overrides: tuple[str, ...], told: str) -> None:
    found = problems(*overrides, world=world)
    switch = overrides[0].partition("[")[2].rstrip("]")
    assert any(text.startswith(f"train.switches ({switch}) must be left out with {told}") for text in found), found


def test_models_that_no_graph_holds_and_a_switch_that_is_none() -> None:
    told = "train.switches (cuda_graphs) must be left out with model.family"
    assert f"{told} (bert)" in problems(*GRAPHS, recipe="bert-tiny", world=1)
    experts = f"{told} (olmoe), which has experts, or may have them"
    assert experts in problems(*GRAPHS, recipe="olmoe-tiny", world=1)
    assert "cuda_graphs" in problem("train.switches=[cuda_graph]")
