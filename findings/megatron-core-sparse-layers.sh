#!/usr/bin/env bash
# Guess: "every second layer has experts" is the same model by Megatron Core's moe_layer_freq=2 as by decoder_sparse_step=2
# of transformers' Qwen3-MoE, so the number carries over.
# Seen in megatron-core 0.16.1 and transformers 5.23.0: Megatron counts from the first layer on (0, 2, …), transformers has
# experts where the number of the layer, counted from 1, is a multiple (1, 3, …). With 3, Megatron gives layers 0 and 3,
# transformers 2 and 5. What carries over is the list of layers: mlp_only_layers there, a list of 0 and 1 here.
#   of 6 layers, every 2nd: megatron-core [0, 2, 4], transformers [1, 3, 5]; every 3rd: [0, 3] and [2, 5]
# PYTHON names an interpreter that has megatron-core==0.16.1 and transformers==5.23.0 (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'PY'
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def of_megatron(every: int) -> list[int]:
    config = TransformerConfig(
        num_layers=6, hidden_size=32, num_attention_heads=4, num_moe_experts=4, moe_layer_freq=every
    )
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization="RMSNorm")
    return [number for number, spec in enumerate(specs) if "MoE" in str(spec.submodules.mlp)]


def of_transformers(every: int) -> list[int]:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=every,
    )
    layers = Qwen3MoeForCausalLM(config).model.layers
    return [number for number, layer in enumerate(layers) if "Sparse" in type(layer.mlp).__name__]


found = {every: (of_megatron(every), of_transformers(every)) for every in (2, 3)}
print(f"of 6 layers, every 2nd: megatron-core {found[2][0]}, transformers {found[2][1]}; every 3rd: "
      f"{found[3][0]} and {found[3][1]}")
assert found == {2: ([0, 2, 4], [1, 3, 5]), 3: ([0, 3], [2, 5])}
PY
"$python" -W ignore "$folder/try.py"
