"""Dropout: a function of its key, whatever ran before, and of the element's number in `invariant` mode."""

import pytest
import torch

from shardwise.distributed.mesh import Group
from shardwise.layers.dropout import Dropout, DropoutKey
from tests.unit.layers.groups import pretend_group

S, B, H = 12, 4, 16
MODES = ["fast", "invariant"]


def key(mode: str = "fast", *, step: int = 3, first: int = 8, samples: int = B) -> DropoutKey:
    return DropoutKey(1, step, torch.arange(first, first + samples), first, mode)  # type: ignore[arg-type]


def dropped(group: Group | None = None, **options: bool) -> Dropout:
    return Dropout(0.5, layer=0, site=1, group=group, **options)


def masked(layer: Dropout, k: DropoutKey, rows: int = S, samples: int = B, width: int = H) -> torch.Tensor:
    return layer(torch.ones(rows, samples, width), k)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_keeps_the_share_and_the_mean(mode: str, p: float) -> None:
    y = masked(Dropout(p, layer=0, site=1), key(mode), 64, B, 512)
    share = float((y == 0).float().mean())
    n = y.numel()
    assert abs(share - p) <= 5 * (p * (1 - p) / n) ** 0.5
    assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))


@pytest.mark.parametrize("mode", MODES)
def test_the_key_decides_whatever_ran_before_and_gradients_pass_through_the_mask(mode: str) -> None:
    layer = Dropout(0.5, layer=2, site=1)
    first = masked(layer, key(mode))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert torch.equal(masked(layer, key(mode)), first)
    assert torch.equal(torch.get_rng_state(), before), "dropout moved torch's own generator"
    others = [
        masked(layer, key(mode, step=4)),
        masked(layer, key(mode, first=12)),
        masked(Dropout(0.5, layer=3, site=1), key(mode)),
        masked(Dropout(0.5, layer=2, site=2), key(mode)),
    ]
    for number, other in enumerate(others):
        agreeing = float((other == first).float().mean())
        assert abs(agreeing - 0.5) < 0.1, f"mask {number} is related to the first: they agree on {agreeing:.0%}"
    layer = Dropout(0.25, layer=0, site=1)
    x = torch.ones(S, B, H, requires_grad=True)
    assert layer(x, None) is x, "without a key nothing is dropped"
    y = layer(x, key(mode))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_masks_of_ranks_are_parts_of_one_mask_or_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [pretend_group(r, 2) for r in range(2)]
    shards = [masked(dropped(group, sequence_parallel_enabled=True), key()) for group in groups]
    copies = [masked(dropped(group), key()) for group in groups]
    assert torch.equal(*copies)
    assert abs(float((shards[0] == shards[1]).float().mean()) - 0.5) < 0.1
    # As the input of a row-parallel layer is cut: `invariant` masks are columns of the whole, `fast` ones differ.
    whole = masked(dropped(), key("invariant"))
    cut = [dropped(pretend_group(r, 4), input_is_parallel=True) for r in range(4)]
    columns = [masked(layer, key("invariant"), width=H // 4) for layer in cut]
    assert torch.equal(torch.cat(columns, dim=-1), whole)
    fast = [masked(layer, key(), width=H // 4) for layer in cut]
    assert abs(float((fast[0] == fast[1]).float().mean()) - 0.5) < 0.2, "two ranks draw related masks"
    with pytest.raises(ValueError, match="must not both be true: one dim is cut"):
        dropped(sequence_parallel_enabled=True, input_is_parallel=True)
    # By sequence shards, by samples and by what is hashed at once: each draws its part of the whole.
    whole = masked(dropped(), key("invariant"))
    cut = [dropped(pretend_group(r, 4), sequence_parallel_enabled=True) for r in range(4)]
    shards = [masked(layer, key("invariant"), S // 4) for layer in cut]
    assert torch.equal(torch.cat(shards), whole)
    halves = [masked(dropped(), key("invariant", first=f, samples=2), S, 2) for f in (8, 10)]
    assert torch.equal(torch.cat(halves, dim=1), whole)
    monkeypatch.setattr("shardwise.layers.dropout.MASK_CHUNK_ELEMENTS", 100)
    assert torch.equal(masked(dropped(), key("invariant")), whole)


def test_invariant_masks_are_those_of_splitmix64() -> None:
    """The first elements of one sample, by Python's integers."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    k = key("invariant")
    stream = mix(8 ^ k.number(0, 1))
    numbers = [mix((stream + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(H)]
    wanted = [(n - 2**64 if n >= 2**63 else n) >= int(0.3 * 2.0**64) - 2**63 for n in numbers]
    found = masked(Dropout(0.3, layer=0, site=1), k)[0, 0] != 0
    assert found.tolist() == wanted
