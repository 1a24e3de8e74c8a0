"""Memory formulas against the bytes per parameter that are promised and against what autograd really keeps."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.config import Config, Layout, check_layout, load_config
from shardwise.distributed.mesh import Group
from shardwise.estimates.activations import BlockStack
from shardwise.estimates.communication import evaluation_transfers, step_transfers, wire_bytes
from shardwise.estimates.memory import MemoryEstimate, checkpoint_bytes, expected_memory
from shardwise.estimates.memory_choice import fitted_to_memory, memory_choice_text
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.estimates.sharding import bucket_shapes
from shardwise.layers.dropout import DropoutKey
from shardwise.models import attention
from shardwise.models.build import build_model
from shardwise.models.parameter_counts import canonical_tensor_count, local_parameter_count, parameter_count
from tests.block_stacks import block_stack
from tests.unit.estimates.families import MODELS, OWN, make_config, section

VOCABULARY, HIDDEN, LAYERS = 500, 64, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 176, "num_hidden_layers": LAYERS,
}  # fmt: skip


def config(
    model: str = "llama",
    *,
    mode: str | None = "float32",
    moments: str | None = None,
    zero: int = 1,
    p: float = 0.0,
    length: int = 64,
    sizes: dict[str, Any] = {},  # noqa: B006  never changed
    **train: object,
) -> Config:
    return make_config(
        section(model, p, **SIZES | sizes),
        train={"sequence_length": length, **train},
        optimizer={"zero": zero},
        precision={"mode": mode, "moments": moments},
    )


def estimate(config: Config, layout: Layout = Layout(1), accelerator: bool = False) -> MemoryEstimate:  # noqa: B008
    return expected_memory(config, layout, accelerator)


def case(config: Config, layout: Layout = Layout(1), accelerator: bool = False) -> RankWorkload:  # noqa: B008
    return RankWorkload.of(config, layout, accelerator)


def stack(config: Config, accelerator: bool = False) -> BlockStack:
    return block_stack(case(config, accelerator=accelerator))


def parameters(config: Config, tensor: int = 1) -> int:
    return local_parameter_count(config.model, tensor)


@pytest.mark.parametrize(
    ("mode", "moments", "parameter", "gradient", "state"),
    [
        ("float32", None, 4, 4, 8),
        ("mixed", None, 2, 4, 12),
        ("bfloat16", None, 2, 2, 4),
        ("float32", "bfloat16", 4, 4, 4),
        ("mixed", "bfloat16", 2, 4, 8),
    ],
)
@pytest.mark.parametrize(("optimizer", "data"), [("adamw", 1), ("lamb", 4)])
def test_bytes_per_parameter(
    optimizer: str, mode: str, moments: str | None, parameter: int, gradient: int, state: int, data: int
) -> None:
    precision = {"mode": mode, "moments": moments}
    chosen = make_config(section("llama"), optimizer={"name": optimizer}, precision=precision)
    elements = sum(bucket.elements for bucket in bucket_shapes(case(chosen, Layout(data))))
    assert 0 <= elements - parameters(chosen) < 2 * 32 * data
    memory = estimate(chosen, Layout(data))
    assert (memory.parameters, memory.gradients) == (parameter * elements, gradient * elements)
    assert memory.optimizer == state * elements // data


def test_muon_zero_and_what_is_not_known() -> None:
    for data in [1, 4]:
        chosen = make_config(section("llama"), optimizer={"name": "muon"})
        matrices = local_parameter_count(chosen.model, 1, block_matrices=True) or 0
        found = estimate(chosen, Layout(data)).optimizer
        wanted = 4 * (2 * parameters(chosen) - matrices) / data
        assert 0 <= found - wanted < 4 * 2 * 32 * 3, "but for the padding of three kinds of buckets"
        assert checkpoint_bytes(chosen) == 4 * (3 * parameters(chosen) - matrices)
    # Two moments in float32 of a quarter of what a tensor-parallel rank holds, and padding.
    state = estimate(config(), Layout(8, tensor=2)).optimizer
    assert state == pytest.approx(2 * 4 * parameters(config(), 2) / 4, rel=1e-3)
    assert parameter_count(OWN.model) is None
    assert local_parameter_count(OWN.model, 2) is None
    assert canonical_tensor_count(OWN.model) is None
    assert expected_memory(OWN, Layout(1)) is None
    assert checkpoint_bytes(OWN) is None
    assert wire_bytes(step_transfers(OWN, Layout(2))) is None
    assert wire_bytes(evaluation_transfers(OWN, Layout(2))) is None


class Saved:
    """What autograd saves of a model's last hidden states, and these: bytes beside parameters and inputs."""

    def __init__(self, config: Config) -> None:
        train, dtype = config.train, getattr(torch, config.precision.resolved(False).parameter)
        model: Any = build_model(config, Group(), sequence_parallel=False, dtype=dtype)
        ids = torch.zeros(train.sequence_length, train.micro_batch, dtype=torch.int64)
        inputs = {"ids_SB": ids}
        if not config.model.causal:
            inputs |= {"token_types_SB": ids.clone(), "mask_SB": torch.ones_like(ids)}
        if hasattr(model.config, "rope_theta"):  # the tables are buffers
            self.seen(model, inputs, None)
        key = None
        if config.model.has_dropout:
            key = DropoutKey(1, 1, torch.arange(train.micro_batch), 0, train.dropout_mode)
        self.bytes = self.seen(model, inputs, key)

    @staticmethod
    def seen(model: Any, inputs: dict[str, torch.Tensor], key: DropoutKey | None) -> int:
        owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *inputs.values())}
        saved: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage().data_ptr()
            if storage not in owned:
                saved[storage] = tensor
            return tensor

        # Hooks that may keep tensors would let blocks work apart.
        with (
            patch.object(attention, "others_keep_tensors", return_value=False),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            hidden = model.hidden(**inputs, dropout=key)
        saved[hidden.untyped_storage().data_ptr()] = hidden
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def beside(config: Config) -> int:
    """Small tensors that are no activations: rotary tables, numbers of learned positions, places of queries."""
    kinds = 1 if case(config).model.window_rope_theta is None else 2
    rotary = case(config).a * case(config).model.rotary_dim * kinds
    model = case(config).model
    # Attention by pieces, on a CPU without dropout, keeps where its queries begin and end.
    has_window = any(model.window(layer) for layer in range(model.num_hidden_layers))
    places = 16 * (has_window and not model.has_dropout)
    return config.train.sequence_length * (rotary or 8) + places


@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kv_heads", "micro_batch", "length"), [(4, 2, 64), (2, 2, 64), (1, 1, 128)])
def test_activations_of_shared_heads(mode: str, kv_heads: int, micro_batch: int, length: int) -> None:
    chosen = config(mode=mode, sizes={"num_key_value_heads": kv_heads}, micro_batch=micro_batch, length=length)
    assert estimate(chosen).activations == Saved(chosen).bytes - beside(chosen)


@pytest.mark.parametrize("p", [0.0, 0.1], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_activations_are_what_autograd_saves(model: str, mode: str, p: float) -> None:
    chosen = config(model, mode=mode, p=p)
    assert estimate(chosen).activations == Saved(chosen).bytes - beside(chosen)


@pytest.mark.parametrize("model", MODELS)
def test_activations_beside_fp8_products_are_what_autograd_saves(model: str) -> None:
    chosen = config(model, mode="bfloat16", micro_batch=2, p=0.1)
    precision = chosen.precision.model_copy(update={"matmul": "fp8"})
    in_fp8 = chosen.model_copy(update={"precision": precision})
    # Each product also keeps two scales.
    scales = 4 * 2 * 4 * in_fp8.known_shapes.num_hidden_layers
    assert estimate(in_fp8).activations == Saved(in_fp8).bytes - beside(in_fp8) - scales


def test_what_fused_kernels_and_compilers_keep() -> None:
    fast, invariant, none = (
        stack(config("gpt", p=p, dropout_mode=mode), accelerator=True).kept
        for p, mode in ((0.1, "fast"), (0.1, "invariant"), (0.0, "fast"))
    )
    tokens, heads, length = 128, 4, 64
    masks = tokens * (2 * HIDDEN + SIZES["intermediate_size"])
    assert fast - none == LAYERS * masks
    probabilities = tokens * heads * length * (4 + 1 + 4)
    log_sum_exp = 4 * tokens * heads
    # Queries, keys and values are copied, and their joint source is free: as many bytes.
    assert invariant - fast == LAYERS * (probabilities + length**2 - log_sum_exp)
    # Measured on a GPU: compiled blocks hold as much with `selective` as without, and copies of rotated heads.
    plain, fused, core = config(), config(recompute="selective"), config("gpt", p=0.1, recompute="selective")
    of_plain, of_fused, of_core = (
        stack(c.model_copy(update={"compile": c.compile.model_copy(update={"enabled": True})})).kept
        for c in (plain, fused, core)
    )
    assert stack(fused).kept < stack(plain).kept < of_plain == of_fused
    assert of_core == stack(core).kept


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_the_peak_is_the_largest_of_all_moments(model: str, recompute: str) -> None:
    chosen = config(model, p=0.1, recompute=recompute)
    memory = estimate(chosen)
    state = memory.parameters + memory.gradients + memory.optimizer
    assert memory.total >= state + stack(chosen).peak
    assert memory.total >= state + memory.activations + memory.loss


def test_what_norms_losses_and_tied_heads_hold() -> None:
    chosen = config(mode="bfloat16")
    difference = estimate(chosen).activations - estimate(chosen, accelerator=True).activations
    assert difference == 7 * 128 * 64 * (2 * 4 - 2)
    few, many = (estimate(config(length=length, micro_batch=8)).loss for length in (1024, 8192))
    assert many - few == 4 * 64 * 8 * (8192 - 1024)  # only the gradient of the input grows
    chosen = make_config(
        section("bert", **SIZES | {"vocab_size": 500_000}), data={"max_predictions": 1}, precision={"mode": "mixed"}
    )
    memory = estimate(chosen)
    head, embedding, total = 4, 4, 4
    gradients = (head + embedding + total) * 500_000 * HIDDEN
    assert memory.activations + memory.loss + memory.buffers == gradients + 2 * 32 * HIDDEN  # and of x


@pytest.mark.parametrize(
    ("mode", "moments", "accelerator", "each"),
    [
        ("float32", None, True, 4 + 2 * 4),
        ("mixed", None, False, 2 + 3 * 4),
        ("mixed", "bfloat16", False, 2 + 4 + 2 * 2),
        ("bfloat16", None, False, 2 + 2 * 2),
        (None, None, True, 2 + 3 * 4),
    ],
)
def test_bytes_of_a_checkpoint(mode: str | None, moments: str | None, accelerator: bool, each: int) -> None:
    chosen = config(mode=mode, moments=moments)
    assert checkpoint_bytes(chosen, accelerator) == each * parameters(chosen)


TP8 = Layout(8, tensor=8, sequence_parallel=True)
ORDER = (("none", False), ("none", True), ("selective", True), ("full", False))


def llama(*overrides: str) -> Config:
    return load_config("llama2-7b", ["parallel.tensor=8", "parallel.sequence=true", *overrides])


def total(config: Config, layout: Layout = TP8) -> int:
    memory = expected_memory(config, layout, True)
    return memory.total


def fit(config: Config, memory: float | None, layout: Layout = TP8) -> Config:
    return fitted_to_memory(config, layout, memory, accelerator=True, device="a device")


def chosen(memory: float | None, *overrides: str) -> tuple[str, bool]:
    config = fit(llama(*overrides), memory)
    return config.recompute, config.regathers


def test_the_first_choice_that_fits_is_taken_and_inputs_are_gathered_again_if_memory_asks() -> None:
    needed = []
    for recompute, regathers in ORDER:
        given = (f"train.recompute={recompute}", f"parallel.sequence_regather={str(regathers).lower()}")
        needed.append(total(llama(*given)))
        assert chosen(None, *given) == (recompute, regathers), "nothing is left open"
    assert needed == sorted(needed, reverse=True), "each choice needs less than the one before"
    for choice, bytes_needed in zip(ORDER, needed, strict=True):
        assert chosen(bytes_needed, "train.recompute=auto") == choice
    assert chosen(1, "train.recompute=auto") in (ORDER[-1], ("full", True)), "where none fits, the least"
    needed = total(llama("train.recompute=none", "parallel.sequence_regather=false"))
    assert chosen(needed, "train.recompute=none") == ("none", False)
    assert chosen(needed - 1, "train.recompute=none") == ("none", True)
    assert chosen(needed - 1, "train.recompute=none", "parallel.sequence_regather=false") == ("none", False)
    assert chosen(needed - 1, "train.recompute=none", "compile.enabled=true") == ("none", False)
    assert chosen(1, "train.recompute=none", "precision.matmul=fp8") == ("none", False)
    assert chosen(None, "train.recompute=none") == ("none", False)


def test_choices_are_named_and_keys_come_in_a_ring_if_memory_asks() -> None:
    config = llama("train.recompute=auto")
    assert memory_choice_text(fit(config, 1e15), config) == "train.recompute=none"
    assert (memory_choice_text(fit(config, 1), config) or "").startswith("train.recompute=full")
    assert memory_choice_text(config, config) is None
    with pytest.raises(ConfigError, match="must be none, selective or full on a device, whose memory is not known"):
        chosen(None, "train.recompute=auto")
    own = OWN.with_keys(train={"recompute": "auto"})
    with pytest.raises(ConfigError, match="must be none, selective or full for a model of your own"):
        fit(own, 1e9, check_layout(own, 1))
    layout = Layout(16, tensor=1, context=16)
    long = ("train.sequence_length=262144", "model.max_position_embeddings=262144", "train.global_batch=16")
    keys = ("parallel.tensor=1", "parallel.sequence=false", "parallel.context=16", "train.recompute=full", *long)

    def passes_keys(memory: float | None, *overrides: str) -> bool:
        return fit(load_config("llama2-7b", [*keys, *overrides]), memory, layout).passes_keys

    needed = total(load_config("llama2-7b", keys), layout)
    assert not passes_keys(needed)
    assert passes_keys(needed - 1)
    assert not passes_keys(needed - 1, "parallel.context_keys=gather")
    assert not passes_keys(needed - 1, "compile.enabled=true")
    assert not passes_keys(None)
    config = load_config("llama2-7b", keys)
    assert memory_choice_text(fit(config, 1, layout), config) == "parallel.context_keys=ring"
