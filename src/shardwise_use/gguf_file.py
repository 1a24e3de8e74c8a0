"""A checkpoint as one GGUF file, which llama.cpp opens, written by the package `gguf` (format: docs/gguf.md of ggml).

Weights are read, cast and written some rows at a time; those whose rows or columns llama.cpp wants in another order are
in memory one by one. The names of tensors come from the package, and the keys from the model's facts.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import ConfigError, RunError, listing
from shardwise.base.files import reason_of
from shardwise.base.hub import TOKENIZER, TOKENIZER_CONFIG
from shardwise.base.progress import progress
from shardwise.base.registered import optional_library
from shardwise.base.yaml_and_json import json_object
from shardwise.checkpoint.format.export_checkpoint import Export
from shardwise.checkpoint.format.model_files import BEGIN_ID, END_ID, FilesBesideWeights, special_ids
from shardwise.checkpoint.format.safetensors import DTYPES, FLOATING
from shardwise.checkpoint.format.writing import StreamedWeight, require_disk_room
from shardwise.checkpoint.storage.root import Buffer, Root
from shardwise.config.rope_scaling import LENGTH
from shardwise.data.tokens.tokenizer_files import CHAT_TEMPLATE
from shardwise_use.gguf_tokenizer import GGUFVocabulary, gguf_vocabulary
from shardwise_use.sparse_models import add_gguf_keys, split_sparse_name

_ARCHITECTURES = {
    "gpt": "gpt2", "gpt_neox": "gptneox", "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2",
    "qwen3": "qwen3", "olmo2": "olmo2", "olmo3": "olmo2", "gemma3": "gemma3", "smollm3": "smollm3", "olmoe": "olmoe",
    "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe",
}  # fmt: skip
"""Family → llama.cpp's architecture."""
_TURNS_NEIGHBOURS = ("llama", "smollm3")
"""Architectures in which rotary positions turn dimensions 2i and 2i + 1 of a head, in place of i and i + d/2."""
_NEEDS_HEAD = ("gptneox", "olmo2", "olmoe")  # architectures without a tied output head: the embedding is written twice
_Change: TypeAlias = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
_IN_FLOAT32 = ("ffn_gate_inp.weight", "position_embd.weight")
"""Matrices that llama.cpp computes with in float32 alone; so it does with all vectors."""


class GGUFExport:
    """An export of a model into one GGUF file, planned before anything is written.

    Args:
        folder, dtype: as those of `Export`; vectors and routers stay in float32.

    Raises:
        ConfigError: llama.cpp knows no such model, or no such tokenizer. DataError: the package `gguf` is not
        installed. What `Export` raises.
    """

    def __init__(self, folder: Root, dtype: str | None = None) -> None:
        self._gguf = optional_library("gguf", "--gguf needs", "gguf")
        self.export = Export(folder, dtype)
        self._in_float32 = {weight.name: weight for weight in Export(folder, "float32").weights}
        self.model = self.export.model
        if self.model.family not in _ARCHITECTURES:
            raise ConfigError(
                f"the model's family ({self.model.family}) must be one that llama.cpp generates text with: "
                f"{listing(_ARCHITECTURES, 'or')}"
            )
        self.architecture = _ARCHITECTURES[self.model.family]
        self._files = self.export.small_files()
        self.tensors = self._planned()
        self.vocabulary = self._vocabulary()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def dtypes(self) -> set[str]:
        return {FLOATING[tensor.dtype] for tensor in self.tensors}

    def write(self, path: Path) -> tuple[str, ...]:
        """Write the file, which appears complete or not at all; returns sentences for the user about it.

        ConfigError: it exists. RunError: out of space, or the like. What reading the weights raises.
        """
        if path.exists():
            raise ConfigError(f"{path} exists already: choose another name, or remove it")
        parent = Root.of(path.parent)
        parent.make()
        require_disk_room(parent, self.nbytes, f"writing {path.name}")
        partial_path = path.with_name(f".{path.name}.partial")
        try:
            with progress(f"writing {path.name}", self.nbytes) as advance:
                self._write(partial_path, advance)
            partial_path.replace(path)
            parent.sync()
        except OSError as error:
            raise RunError(f"{path} cannot be written: {reason_of(error)}; nothing is left of it") from None
        finally:
            with contextlib.suppress(OSError):
                partial_path.unlink()
        if self.vocabulary is None:
            return ("the checkpoint has no tokenizer: llama.cpp opens the file, and takes ids alone",)
        return self.vocabulary.notes

    def _write(self, path: Path, advance: Callable[[int], None]) -> None:
        writer = self._gguf.GGUFWriter(path, self.architecture)
        self._add_model(writer)
        self._add_tokenizer(writer)
        for tensor in self.tensors:
            kind = getattr(self._gguf.GGMLQuantizationType, tensor.dtype)
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            (file,) = writer.fout
            for tensor in self.tensors:
                writer.write_padding(file, file.tell())
                for data in tensor.read():
                    file.write(data)
                    advance(memoryview(data).nbytes)
            writer.write_padding(file, file.tell())
            file.flush()
            os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):  # a full disk is told by the write that failed
                writer.close()

    # ---- tensors

    def _planned(self) -> list[StreamedWeight]:
        arch = next(key for key, name in self._gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        names = self._gguf.get_tensor_name_map(arch, self.model.num_hidden_layers)
        tensors: dict[str, StreamedWeight] = {}
        numbered: dict[str, dict[int, StreamedWeight]] = {}
        for weight in self.export.weights:
            plain, number = split_sparse_name(weight.name.replace("_correction_bias", "_correction.bias"))
            name = names.get_name(plain, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise ConfigError(f"llama.cpp's architecture {self.architecture} has no tensor for {weight.name}")
            tensors[name] = self._tensor(weight, name)
            if number is not None:
                numbered.setdefault(name, {})[number] = tensors[name]
        for name, parts in numbered.items():
            ordered = [parts[number] for number in sorted(parts)]
            shape = (len(parts), *ordered[0].shape)
            tensors[name] = replace(ordered[0], shape=shape, read=partial(_one_by_one, ordered))
        if self.architecture in _NEEDS_HEAD and "output.weight" not in tensors:
            tensors["output.weight"] = replace(tensors["token_embd.weight"], name="output.weight")
        if (factors := self._rotary[0]) is not None:
            tensors["rope_freqs.weight"] = StreamedWeight(
                "rope_freqs.weight", "F32", factors.shape, lambda: iter([factors.tobytes()])
            )
        return list(tensors.values())

    def _tensor(self, weight: StreamedWeight, name: str) -> StreamedWeight:
        if len(weight.shape) == 1 or name.endswith(_IN_FLOAT32):
            weight = self._in_float32[weight.name]
        change = self._change(weight.name, name)
        if change is None:
            return replace(weight, name=name)
        shape = change(np.empty(weight.shape, np.float32)).shape
        return replace(weight, name=name, shape=shape, read=partial(_changed, weight, change))

    def _change(self, name: str, new_name: str) -> _Change | None:
        model = self.model
        if re.search(r"attn_[qk]\.", new_name) and self.architecture in _TURNS_NEIGHBOURS:
            return partial(_neighbours, head_dim=model.head_dim)
        if "attn_qkv" in new_name and model.interleaved_heads:
            return partial(_by_kind, heads=model.num_attention_heads)
        if model.norm_has_unit_offset and "norm" in new_name:
            factor = 1.0
            if "attn_q_norm" in new_name and model.attention_scale is not None:
                # llama.cpp has no key for the scale of scores, and takes that of this width; 62 blocks are Gemma 3 27B.
                is_27b = model.num_hidden_layers == 62
                width = model.hidden_size // model.num_attention_heads if is_27b else model.head_dim
                factor = model.attention_scale * math.sqrt(width)
            return partial(_plus_one, factor=np.float32(factor))
        # GPT-2's matrices are those of its Conv1D, [in, out].
        if self.architecture == "gpt2" and re.search(r"\.c_\w+\.weight", name):
            return np.transpose
        return None

    @cached_property
    def _rotary(self) -> tuple[npt.NDArray[np.float32] | None, float]:
        """llama.cpp's divisors of the angle of each pair, if it needs some, and the factor on the angles."""
        model: Any = self.model
        scaling = getattr(model, "rope_scaling", None)
        kind = (scaling or {}).get("rope_type", "default")
        if scaling is None or kind == "default":
            return None, 1.0
        from shardwise.models.rotary import frequencies  # torch

        is_llama = self.architecture == "llama"
        if kind in ("dynamic", "longrope") or (kind == "llama3" and not is_llama):
            valid = "linear, yarn or llama3" if is_llama else "linear or yarn"
            raise ConfigError(
                f"model.rope_scaling.rope_type ({kind}) must be {valid}: llama.cpp's architecture {self.architecture} "
                "computes no other"
            )
        scaled, attention = frequencies(model, model.max_position_embeddings)
        plain, _ = frequencies(model.model_copy(update={"rope_scaling": None}), 1)
        return ((plain / scaled).numpy() if is_llama else None), attention

    # ---- keys

    def _add_model(self, writer: Any) -> None:
        model = self.model
        writer.add_name(f"{model.family} trained with shardwise, step {self.export.step:,}")
        writer.add_context_length(model.max_position_embeddings)
        writer.add_embedding_length(model.hidden_size)
        writer.add_block_count(model.num_hidden_layers)
        writer.add_feed_forward_length(model.intermediate_size)
        writer.add_head_count(model.num_attention_heads)
        writer.add_head_count_kv(model.num_key_value_heads)
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
        writer.add_vocab_size(model.vocab_size)
        add_eps = writer.add_layer_norm_rms_eps if model.norm_kind == "rms_norm" else writer.add_layer_norm_eps
        add_eps(model.norm_eps)
        if self.architecture == "gptneox":
            writer.add_parallel_residual(model.parallel_residual)
        main = self.export.dtypes.most_common(1)[0][0]
        kinds = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}
        writer.add_file_type(getattr(self._gguf.LlamaFileType, kinds.get(main, "GUESSED")))
        if model.rotary_dim:
            self._add_rotary(writer)
        windows = [model.window(layer) for layer in range(model.num_hidden_layers)]
        if any(windows) and self.architecture in ("gemma3", "olmo2"):
            writer.add_sliding_window(max(filter(None, windows)))
            writer.add_sliding_window_pattern([window is not None for window in windows])
        add_gguf_keys(writer, self._gguf, model)

    def _add_rotary(self, writer: Any) -> None:
        model: Any = self.model
        writer.add_rope_dimension_count(model.rotary_dim)
        writer.add_rope_freq_base(model.rope_theta)
        if model.window_rope_theta is not None:
            writer.add_rope_freq_base_swa(model.window_rope_theta)
        divisors, attention = self._rotary
        scaling = model.rope_scaling or {}
        if divisors is not None:
            writer.add_rope_scaling_attn_factors(attention)
        elif (kind := scaling.get("rope_type")) in ("linear", "yarn"):
            writer.add_rope_scaling_type(self._gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(scaling["factor"])
        if divisors is None and scaling.get("rope_type") == "yarn":
            # llama.cpp multiplies by the paper's factor itself.
            writer.add_rope_scaling_attn_factors(attention / (1 + 0.1 * math.log(scaling["factor"])))
            writer.add_rope_scaling_orig_ctx_len(scaling.get(LENGTH) or model.max_position_embeddings)
            writer.add_rope_scaling_yarn_beta_fast(scaling.get("beta_fast") or 32)
            writer.add_rope_scaling_yarn_beta_slow(scaling.get("beta_slow") or 1)

    # ---- tokenizer

    def _vocabulary(self) -> GGUFVocabulary | None:
        if TOKENIZER not in self._files:
            return None
        return gguf_vocabulary(json_object(self._files[TOKENIZER], TOKENIZER), self.model.vocab_size)

    def _add_tokenizer(self, writer: Any) -> None:
        if self.vocabulary is None:
            writer.add_tokenizer_model("none")
            return
        writer.add_tokenizer_model(self.vocabulary.model)
        writer.add_tokenizer_pre(self.vocabulary.pre)
        writer.add_token_list(self.vocabulary.tokens)
        writer.add_token_types(self.vocabulary.types)
        writer.add_token_merges(self.vocabulary.merges)
        writer.add_token_scores(self.vocabulary.scores)
        writer.add_add_space_prefix(self.vocabulary.has_space_prefix)
        tokenizer = FilesBesideWeights("the checkpoint", {}, self._files).tokenizer()
        assert tokenizer is not None
        described = self.export.described
        ends = [*special_ids({END_ID: described.get(END_ID)}), *filter(None, [tokenizer.end_of_document_id])]
        if not ends:
            raise ConfigError("the tokenizer must have a token that ends a text: llama.cpp would take token 11 for it")
        writer.add_eos_token_id(ends[0])
        if len(ends) > 1:
            writer.add_eot_token_id(ends[1])
        begin = tokenizer.begin_of_text
        begins = special_ids({BEGIN_ID: described.get(BEGIN_ID)})
        begin_id = tokenizer.token_id(begin) if begin is not None else next(iter(begins), ends[0])
        writer.add_bos_token_id(begin_id)
        writer.add_add_bos_token(begin is not None)
        writer.add_add_eos_token(False)
        settings = json_object(self._files.get(TOKENIZER_CONFIG, b"{}"), TOKENIZER_CONFIG)
        template = (
            self._files[CHAT_TEMPLATE].decode() if CHAT_TEMPLATE in self._files else settings.get("chat_template")
        )
        if isinstance(template, str):
            writer.add_chat_template(template)


def _changed(weight: StreamedWeight, change: _Change) -> Iterator[Buffer]:
    values = np.frombuffer(b"".join(weight.read()), DTYPES[weight.dtype]).reshape(weight.shape)
    yield np.ascontiguousarray(change(values)).tobytes()


def _one_by_one(weights: Sequence[StreamedWeight]) -> Iterator[Buffer]:
    return chain.from_iterable(weight.read() for weight in weights)


def _neighbours(values: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Rows of queries or keys, [heads · d, …]: those of each pair, i and i + d/2, become neighbours."""
    heads = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return heads.swapaxes(1, 2).reshape(values.shape)


def _by_kind(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows by head, [heads · 3 · d, …], become all queries, all keys and all values."""
    return values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def _plus_one(values: npt.NDArray[Any], factor: np.float32) -> npt.NDArray[Any]:
    return (values + np.float32(1)) * factor
