"""The keys that queries see, in each form of the mask, are those of the definition."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from shardwise.distributed import devices
from shardwise.distributed.torch_private import cpu_attention, cpu_attention_gradients
from shardwise.models import attention_pieces
from shardwise.models.attention_pieces import define_attention_by_pieces
from shardwise.models.masks import BLOCK, AttentionMask, BlocksMask, DocumentSizes, DocumentsMask, PiecesMask
from shardwise.models.parameter_counts import LONG
from tests.sweeps import few

WINDOWS = (None, 1, 3, 64, 1000)


def starts(length: int, firsts: list[list[int]]) -> Tensor:
    """`[S, B]` of samples whose documents begin at `firsts`."""

    def of_sample(first: Tensor) -> Tensor:
        return first[torch.bucketize(torch.arange(length), first, right=True) - 1]

    return torch.stack([of_sample(torch.tensor(first)) for first in firsts], dim=1)


def seen(mask: AttentionMask, keys: int, samples: int) -> Tensor:
    """Whether each query sees each key, `[B, Q, L]`, by the definition."""
    places = [place for run in mask.places for place in run]
    seen_BQL = torch.zeros(samples, len(places), keys, dtype=torch.bool)
    for b, (row, place) in product(range(samples), enumerate(places)):
        start = 0 if mask.starts_SB is None else int(mask.starts_SB[row, b])
        first = start if mask.window is None else max(start, place - mask.window + 1)
        seen_BQL[b, row, first : place + 1] = True
    return seen_BQL


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", [BLOCK, 3 * BLOCK + 5, 40])
def test_blocks_and_the_dense_mask_are_those_of_the_definition(length: int, window: int | None) -> None:
    late = [[0, min(length - 1, first)] for first in (BLOCK, BLOCK + 72)]
    firsts = [[0], [0, 7, 30], [0, *range(1, length, 31)], *late]
    mask = AttentionMask((range(length),), starts(length, firsts), window)
    seen_BSS = seen(mask, length, len(firsts))
    dense = mask.dense(length, torch.float32, torch.device("cpu"))[:, 0]
    assert torch.equal(dense == 0, seen_BSS)
    assert (dense[~seen_BSS] == float("-inf")).all()
    blocks = mask.blocks(length, torch.device("cpu"))
    for b, seen_SS in enumerate(seen_BSS):
        check_blocks(blocks, b, seen_SS, is_tight=True)


def check_blocks(mask: BlocksMask, b: int, seen_QL: Tensor, *, is_tight: bool) -> None:
    rows, keys = (torch.arange(size) for size in seen_QL.shape)
    found = mask.mask_mod(torch.tensor(b), torch.tensor(0), rows[:, None], keys)
    assert torch.equal(found, seen_QL)
    b = min(b, len(mask.kv_indices) - 1)
    for i, rows_of_block in enumerate(seen_QL.split(BLOCK)):
        blocks = rows_of_block.split(BLOCK, dim=1)
        partial = set(mask.kv_indices[b, 0, i, : mask.kv_num_blocks[b, 0, i]].tolist())
        whole = set(mask.full_kv_indices[b, 0, i, : mask.full_kv_num_blocks[b, 0, i]].tolist())
        assert not partial & whole
        needed = {j for j, block in enumerate(blocks) if block.any()}
        assert partial | whole == needed if is_tight else partial | whole >= needed, "blocks with a key that is seen"
        assert all(blocks[j].all() for j in whole), "a whole block has a key that is not seen"


LENGTH = 600
RUNS = {
    "all queries": (range(LENGTH),),
    "two runs": (range(140), range(430, 570)),
    "the last queries": (range(LENGTH - 20, LENGTH),),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("runs", "has_documents", "window"),
    few(
        product(RUNS, (False, True), WINDOWS),
        ("two runs", False, None),
        *(("two runs", True, window) for window in (None, 3, 64)),
    ),
)
def test_attention_and_its_gradients_are_those_of_the_definition(
    runs: str, has_documents: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    define_attention_by_pieces()
    for name, size in {"SHORT": 48, "SQUARE": 16, "FEW": 100, "MANY": 150}.items():
        monkeypatch.setattr(attention_pieces, name, size)
    numbers = torch.Generator().manual_seed(0)
    places = [place for run in RUNS[runs] for place in run]
    cuts = torch.randint(1, LENGTH, (2, 6), generator=numbers).sort().values.tolist()
    starts_SB = starts(LENGTH, [[0], *([0, *first] for first in cuts)])[places] if has_documents else None
    mask = AttentionMask(RUNS[runs], starts_SB, window)

    def drawn(length: int, heads: int) -> Tensor:
        return torch.randn(length, 3, heads, 8, dtype=torch.float64, generator=numbers).requires_grad_()

    q, k, v = inputs = drawn(len(places), 4), drawn(LENGTH, 2), drawn(LENGTH, 2)
    seen_BQL = seen(mask, LENGTH, 3)
    q_, k_, v_ = (t.permute(1, 2, 0, 3) for t in inputs)
    expected = F.scaled_dot_product_attention(q_, k_, v_, seen_BQL.unsqueeze(1), enable_gqa=True)
    expected = expected.permute(2, 0, 1, 3)
    y = mask.pieces(len(k)).attend(q, k, v, None)
    assert error(y, expected) <= 1e-12
    dy = torch.randn(y.shape, dtype=torch.float64, generator=numbers)
    gradients = [torch.autograd.grad(out, inputs, dy) for out in (y, expected)]
    # Relative to all three, as a query that sees one key has no gradient.
    assert error(*(torch.cat([t.flatten() for t in of_inputs]) for of_inputs in gradients)) <= 1e-12
    q_, k_, v_ = (t.detach() for t in (q_, k_, v_))  # FlexAttention has no gradient on a CPU
    blocks = mask.blocks(LENGTH, torch.device("cpu"))
    for b, seen_QL in enumerate(seen_BQL):
        check_blocks(blocks, b, seen_QL, is_tight=False)
    flexible: Any = flex_attention(q_, k_, v_, block_mask=blocks, enable_gqa=True)
    assert error(flexible.permute(2, 0, 1, 3), expected) <= 1e-12


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def test_the_operator_is_one_of_torchs_and_has_the_bits_of_its_kernel() -> None:
    define_attention_by_pieces()
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(37, 2, heads, 8, generator=numbers).requires_grad_() for heads in (4, 2, 2))
    documents = [starts(37, firsts) for firsts in ([[0], [0, 7, 30]], [[0, 1, 2, 36], [0, 20]])]
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    arguments = (q, k, v, documents[0], torch.tensor([0, 37]), 3, None)
    torch.library.opcheck(torch.ops.shardwise.attention_by_pieces.default, arguments, test_utils=checks)

    def attend(q: Tensor, mask: PiecesMask) -> Tensor:
        return mask.attend(q, k, v, None)

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for number, starts_SB in enumerate(documents):
        mask = AttentionMask((range(37),), starts_SB, 3).pieces(37)
        with torch.compiler.set_stance("default" if number == 0 else "fail_on_recompile"):
            y = compiled(q, mask)
        assert torch.equal(y, attend(q, mask))
    define_attention_by_pieces()
    numbers = torch.Generator().manual_seed(0)
    inputs = [torch.randn(90, 2, 4, 8, generator=numbers, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    mask = AttentionMask((range(90),), starts(90, [[0, 33], [0, 5]]))
    y = mask.pieces(90).attend(*inputs, None)
    dy = torch.randn(y.shape, generator=numbers).to(y.dtype)
    gradients = torch.autograd.grad(y, inputs, dy)
    for b, first, end in ((0, 0, 33), (0, 33, 90), (1, 0, 5), (1, 5, 90)):
        parts = [t.detach()[first:end, b : b + 1].permute(1, 2, 0, 3) for t in (*inputs, y, dy, *gradients)]
        out, log_sums = cpu_attention(*parts[:3], causal=True)
        assert torch.equal(parts[3], out)
        expected = cpu_attention_gradients(parts[4], *parts[:3], out, log_sums, causal=True)
        for found, gradient in zip(parts[5:], expected, strict=True):
            assert torch.equal(found, gradient)


PLAIN = AttentionMask((range(64),))
APART = AttentionMask((range(64),), starts(64, [[0, 7]]))
LONG_WINDOW = AttentionMask((range(LONG),), window=256)


@pytest.mark.parametrize(
    ("mask", "device", "choices", "form"),
    [
        pytest.param(PLAIN, "meta", {}, None, id="all earlier keys"),
        pytest.param(AttentionMask((range(64),), window=64), "meta", {}, None, id="a window as long as the sequence"),
        pytest.param(AttentionMask((range(63, 64),)), "cpu", {}, None, id="the last query"),
        pytest.param(APART, "cpu", {}, PiecesMask, id="documents on a CPU"),
        pytest.param(APART, "cpu", {"is_fused": False}, Tensor, id="dropout on a CPU"),
        pytest.param(AttentionMask((range(64),), window=63), "cpu", {}, PiecesMask, id="a window on a CPU"),
        pytest.param(AttentionMask((range(8, 64),)), "cpu", {}, PiecesMask, id="queries after cached keys"),
        pytest.param(AttentionMask((range(8, 64),), window=9), "meta", {}, Tensor, id="a short window, eager"),
        pytest.param(LONG_WINDOW, "meta", {}, BlocksMask, id="a long sequence, eager"),
        pytest.param(LONG_WINDOW, "meta", {"is_cached": True}, Tensor, id="a long sequence with a cache"),
        pytest.param(AttentionMask((range(64),), window=9), "meta", {"is_compiled": True}, BlocksMask, id="compiled"),
    ],
)
def test_the_form_of_a_mask(mask: AttentionMask, device: str, choices: dict[str, bool], form: Any) -> None:
    like = torch.empty((), device=device)
    options = {"is_compiled": False, "is_fused": True} | choices
    found = mask.form(like, keys=mask.places[-1].stop, head_dim=16, **options)  # type: ignore[arg-type]
    assert found is None if form is None else isinstance(found, form)


@pytest.mark.parametrize(
    ("firsts", "sizes", "rows"),
    [
        ([[0]], (1, 300), 384),
        ([[0, 7, 30], [0, 299]], (5, 299), 384),
        ([[0, 1, 2, 100, 200], [0, 150]], (7, 150), 256),
        ([[*range(300)], [*range(0, 300, 2)]], (450, 2), 256),
    ],
)
def test_a_kernel_is_told_where_documents_begin(firsts: list[list[int]], sizes: tuple[int, int], rows: int) -> None:
    starts_SB = starts(300, firsts)
    found = DocumentSizes.of(starts_SB.numpy())
    assert found == sizes
    mask = AttentionMask((range(300),), starts_SB, 150, documents=found).by_document(300, is_compiled=False)
    begins = [300 * b + first for b, of_sample in enumerate(firsts) for first in of_sample]
    ends = [300 * len(firsts)] * (1 + sizes[0] % 2)
    assert mask.bounds.tolist() == begins + ends, "an even number of documents, the last one empty if need be"
    assert mask.bounds.dtype == torch.int32
    assert len(mask.rows) == rows
    assert mask.window == 150


KNOWN = AttentionMask((range(64),), starts(64, [[0, 7]]).to("meta"), documents=DocumentSizes(2, 57))


def test_documents_go_to_their_kernel_where_the_device_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def form(mask: AttentionMask, **choices: bool) -> Any:
        options = {"is_compiled": False, "is_fused": True} | choices
        return mask.form(torch.empty((), device="meta"), keys=64, head_dim=16, **options)  # type: ignore[arg-type]

    for device in ("cpu", "meta"):
        assert not devices.attends_by_document(torch.device(device), torch.bfloat16, 64)
    assert isinstance(form(KNOWN), Tensor)
    monkeypatch.setattr(devices, "attends_by_document", lambda *_: True)
    assert isinstance(form(KNOWN), DocumentsMask)
    assert isinstance(form(KNOWN, is_compiled=True), DocumentsMask)
    assert isinstance(form(replace(KNOWN, documents=None)), Tensor), "the host does not know them"
    assert isinstance(form(KNOWN, is_fused=False), Tensor), "dropout of probabilities"
    half = replace(KNOWN, places=(range(32, 64),), starts_SB=torch.zeros(32, 1, device="meta"))
    assert isinstance(form(half), Tensor), "keys of other queries"
    for number, expected in ((2**16 - 2, DocumentsMask), (2**16 - 1, Tensor)):
        assert isinstance(form(replace(KNOWN, documents=DocumentSizes(number, 57))), expected), "blocks along a grid"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert isinstance(form(KNOWN), Tensor)
