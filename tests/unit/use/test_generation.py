"""A model of the user's own, which has no cache, and ranks that find no one checkpoint. At every layout: tests/dist."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.storage.root import Root
from shardwise.config import config_from_sections, load_config
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise_use.generation import Prompt, _Uncached
from shardwise_use.inference_jobs import _load_model, run_generation


class Places:
    """Its logits say at which place they were made."""

    def logits(self, ids_SB: Tensor) -> Tensor:
        return torch.arange(len(ids_SB)).view(-1, 1, 1).expand(-1, 1, 5)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_the_text_goes_on_after_its_last_token(length: int) -> None:
    """And not after what fills it up, so that sequence parallelism can cut it evenly."""
    mesh: Any = SimpleNamespace(tp=SimpleNamespace(size=4), device=torch.device("cpu"))
    assert _Uncached(Places(), mesh).next_logits(list(range(length))).tolist() == [float(length - 1)] * 5


def test_no_length_is_compiled_for_one_token() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    class Compiled(Places):
        logits = torch.compile(Places.logits, backend=backend, dynamic=False)

    mesh: Any = SimpleNamespace(tp=SimpleNamespace(size=1), device=torch.device("cpu"))
    assert _Uncached(Compiled(), mesh).next_logits([1, 2]).tolist() == [1.0] * 5
    assert not compiled
    assert Compiled().logits(torch.ones(2, 1)).shape == (2, 1, 5)
    assert compiled


class Silent(nn.Module):
    """A model of the user's own without logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        return self.weight.sum() * ids_SB.numel() * targets_SB.numel()


def test_a_model_without_logits_continues_no_text(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    family = f"{__name__}:Silent"
    values = load_config("llama2-tiny").model_dump() | {"model": {"family": family, "vocab_size": 300}}
    tokenizer = train_tokenizer(["a b"], 257, "text")
    prompt = Prompt((1,), 1, frozenset(), 0.0, 1.0, 1)
    with pytest.raises(ConfigError, match=r"Silent\) has no logits\(ids\): it cannot continue a text"):
        run_generation(config_from_sections(values), Root.of(tmp_path), tokenizer, prompt, lambda _: None)


def test_ranks_that_find_several_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each node has a disk of its own, and one of them holds a newer step."""
    monkeypatch.setattr(collectives, "all_gather_objects", lambda mine, _: [mine, "/other/step-00000200"])
    here = tmp_path / "step-00000100"
    with pytest.raises(ConfigError) as caught:
        _load_model(load_config("gpt-tiny"), Root.of(here), Mesh(device="cpu"))
    folders = ", ".join(sorted(["/other/step-00000200", str(here)]))
    assert caught.value.problems == [f"the ranks found several checkpoints ({folders}): name one of them"]
