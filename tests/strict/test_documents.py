"""Documents within samples, by the kernel that takes each by itself: that of `flash_attention.py`."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version

from shardwise.config import check_layout
from shardwise.estimates.memory import expected_memory
from shardwise.models.masks import AttentionMask, DocumentSizes, DocumentsMask
from tests.dist import cells
from tests.dist.cells import Cell, cells_of, small
from tests.dist.test_memory import configuration
from tests.dist.training import make_config
from tests.rank_pool import Pools
from tests.strict import flash_attention, ranks
from tests.strict.test_memory import WAITS, step
from tests.strict.test_training import STEPS, compare
from tests.sweeps import few
from tests.unit.models.test_masks import error, starts

pytestmark = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 12), reason="torch's kernel for documents knows no shared keys before 2.12"
)
LENGTH = 300
SAMPLES = {
    DocumentSizes(3, 300): [[0], [0], [0]],
    DocumentSizes(8, 299): [[0, 7, 30], [0, 1], [0, 1, 280]],
    DocumentSizes(303, 299): [[*range(300)], [0, 1], [0]],
}
CELLS = small(*cells_of("documents of the strict device"))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: DocumentsMask) -> torch.Tensor:
    return mask.attend(q, k, v, None)


def largest_errors(window: int | None, compiles: bool) -> list[float]:
    """Of a result and of its gradients, beside a dense mask; if compiled in one graph, whatever the documents."""
    attention = attend
    if compiles:
        torch.compiler.reset()
        attention = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")
    device = torch.device("strict", 0)
    errors = []
    for number, (sizes, firsts) in enumerate(SAMPLES.items()):
        q, k, v = inputs = [torch.randn(LENGTH, 3, heads, 8).to(device).requires_grad_() for heads in (4, 2, 2)]
        mask = AttentionMask((range(LENGTH),), starts(LENGTH, firsts).to(device), window, documents=sizes)
        form = mask.form(q, keys=LENGTH, head_dim=8, is_compiled=compiles, is_fused=True)
        assert isinstance(form, DocumentsMask)
        with torch.compiler.set_stance("default" if number == 0 else "fail_on_recompile"):
            y = attention(q, k, v, form)
        dense = mask.dense(LENGTH, q.dtype, device)
        by_head = (x.permute(1, 2, 0, 3) for x in inputs)
        expected = F.scaled_dot_product_attention(*by_head, dense, enable_gqa=True).permute(2, 0, 1, 3)
        dy = torch.randn(y.shape).to(device)
        gradients = (torch.cat([x.flatten() for x in torch.autograd.grad(out, inputs, dy)]) for out in (y, expected))
        errors += [error(y, expected), error(*gradients)]
    return errors


@pytest.mark.parametrize(
    ("window", "compiles"), few([(5, False), (5, True), (None, True), (1, True), (1000, True)], (5, False))
)
def test_attention_is_that_of_a_dense_mask(window: int | None, compiles: bool, strict: Pools) -> None:
    (errors,) = strict(1).run(largest_errors, window, compiles)
    assert max(errors) <= 2e-6


def trained(cell: Cell) -> tuple[list[float], Counter[str]]:
    flash_attention.calls.clear()
    return cells.measure(cell, STEPS).losses, flash_attention.calls


@pytest.mark.parametrize("cell", [CELLS[0], pytest.param(CELLS[1], marks=pytest.mark.slow)], ids=lambda cell: cell.name)
def test_losses_are_those_of_the_cpu(cell: Cell, strict: Pools) -> None:
    wanted = cells.measure(cell.alone, STEPS).losses
    for losses, calls in strict(cell.world).run(trained, cell):
        compare(losses, wanted)
        assert calls["forward"] > calls["backward"] > 0, "another kernel attends"


def test_ranks_that_read_no_data_wait_for_the_sizes_once_a_step(strict: Pools) -> None:
    documents = {"reset_attention_mask": True, "eod_token": cells.END}
    reader, other = strict(2).run(step, make_config(parallel={"tensor": 2}, data=documents), False)
    for found, waits in ((reader, WAITS), (other, WAITS | {"Feed._share": 1})):
        counts = Counter[str]()
        for (_, line), count in found.waits.items():
            if not line.startswith("strict/flash_attention.py"):
                counts[line.rpartition(" ")[2]] += count
        assert counts == waits


def test_a_device_allocates_what_the_estimate_has(strict: Pools) -> None:
    data = {"reset_position_ids": True, "reset_attention_mask": True, "eod_token": cells.END}
    config = configuration("llama", None, 1, "none", precision={"mode": "mixed"}, data=data, train={"global_batch": 2})
    estimate = expected_memory(config, check_layout(config, 1), accelerator=True)
    model = config.known_shapes
    tokens = config.train.micro_batch * config.train.sequence_length
    # This device has no product that adds to a weight's gradient: linear layers keep copies of inputs like this one.
    copies = 2 * model.num_hidden_layers * tokens * model.hidden_size
    ((_, allocated),) = strict(1).run(ranks.step_peak, config)
    assert (estimate.total + copies) / allocated == pytest.approx(1, abs=2e-3)
