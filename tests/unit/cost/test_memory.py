"""Memory formulas against the bytes per parameter that are promised and against what autograd really keeps."""

import pytest
import torch

from shardwise.config import Config, Layout, config_from
from shardwise.cost import expected_memory, final_weights_bytes, local_parameter_count, parameter_count
from shardwise.cost.buckets import padded_elements
from shardwise.models.llama import Llama


def config(
    *, mode: str = "float32", kv_heads: int = 4, micro_batch: int = 2, length: int = 64, zero: int = 1
) -> Config:
    return config_from(
        {
            "model": {
                "family": "llama",
                "vocab_size": 500,
                "hidden_size": 64,
                "intermediate_size": 176,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": kv_heads,
            },
            "train": {"steps": 1, "global_batch": 8, "micro_batch": micro_batch, "sequence_length": length},
            "optimizer": {"lr": 1e-3, "zero": zero},
            "precision": {"mode": mode},
        }
    )


@pytest.mark.parametrize(
    ("mode", "parameter", "gradient", "state"), [("float32", 4, 4, 8), ("mixed", 2, 4, 12), ("bfloat16", 2, 2, 4)]
)
@pytest.mark.parametrize("data", [1, 4])
def test_bytes_per_parameter(mode: str, parameter: int, gradient: int, state: int, data: int) -> None:
    chosen = config(mode=mode)
    elements = padded_elements(chosen, Layout(data))
    assert 0 <= elements - parameter_count(chosen.model) < 2 * 32 * data
    memory = expected_memory(chosen, Layout(data))
    assert (memory.parameters, memory.gradients) == (parameter * elements, gradient * elements)
    assert memory.optimizer == state * elements // data


def test_without_zero_every_rank_keeps_all_state() -> None:
    chosen = config(zero=0)
    assert expected_memory(chosen, Layout(4)).optimizer == 8 * parameter_count(chosen.model)


def test_tensor_parallelism_counts_local_elements() -> None:
    chosen = config(kv_heads=2)
    memory = expected_memory(chosen, Layout(4, tensor=4))
    assert memory.parameters == 4 * local_parameter_count(chosen.model, 4)


def test_rows_add_up() -> None:
    memory = expected_memory(config(), Layout(2))
    assert [name for name, _ in memory.rows()] == [
        "parameters", "gradients", "optimizer", "activations", "loss", "buffers",
    ]  # fmt: skip
    assert memory.total == sum(size for _, size in memory.rows())


@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kv_heads", "micro_batch", "length"), [(4, 2, 64), (2, 2, 64), (1, 1, 128)])
def test_activations_are_what_autograd_saves(mode: str, kv_heads: int, micro_batch: int, length: int) -> None:
    chosen = config(mode=mode, kv_heads=kv_heads, micro_batch=micro_batch, length=length)
    model = Llama(chosen.model, seed=1, dtype=getattr(torch, mode))
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in owned:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(length, micro_batch, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.hidden(ids)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) + hidden.nbytes
    rotary = hidden.element_size() * length * chosen.model.head_dim  # counted as a buffer
    assert expected_memory(chosen, Layout(1)).activations == measured - rotary - ids.nbytes


def test_sequence_parallelism_divides_what_lies_between_the_blocks() -> None:
    chosen = config()
    tensor = expected_memory(chosen, Layout(4, tensor=4)).activations
    sequence = expected_memory(chosen, Layout(4, tensor=4, sequence=True)).activations
    tokens, norms = 128, 7
    between = norms * tokens * (64 * 4 + 4) + tokens * 64 * 4  # norms' inputs and 1/rms; the output
    assert tensor - sequence == between * 3 // 4


def test_an_accelerators_fused_norm_keeps_less() -> None:
    chosen = config(mode="bfloat16")
    difference = expected_memory(chosen, Layout(1)).activations - expected_memory(chosen, Layout(1), True).activations
    assert difference == 7 * 128 * 64 * (2 * 4 - 2)


def test_the_loss_holds_a_chunk_of_logits_however_many_tokens() -> None:
    few, many = (expected_memory(config(length=length, micro_batch=8), Layout(1)).loss for length in (1024, 8192))
    assert many - few == 4 * 64 * 8 * (8192 - 1024)  # only the gradient of the input grows


def test_final_weights_follow_the_parameter_dtype_and_the_device() -> None:
    chosen = config(mode="mixed")
    assert final_weights_bytes(chosen) == 2 * parameter_count(chosen.model)
    assert final_weights_bytes(config()) == 4 * parameter_count(chosen.model)
