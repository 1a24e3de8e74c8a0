"""A checkpoint as a plain Hugging Face folder: weights in any floating-point format, and the files beside them.

Weights are read, cast and written some rows at a time, whatever the layout that wrote them; every chunk that is read is
verified. What only training needs, optimizer states and the manifest, stays behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

from shardwise.base.errors import ConfigError, DamageError, RunError, listing, see
from shardwise.base.tensor_box import box_segments
from shardwise.base.yaml_and_json import json_value
from shardwise.checkpoint.format import writing
from shardwise.checkpoint.format.manifest import MANIFEST, MODEL, Manifest
from shardwise.checkpoint.format.model_card import MODEL_CARD, model_card
from shardwise.checkpoint.format.model_files import with_readable_tokenizer
from shardwise.checkpoint.format.safetensors import DTYPES, FLOATING, FLOATS, cast_overflows, cast_values
from shardwise.checkpoint.format.stored_tensors import StoredTensors
from shardwise.checkpoint.format.weight_files import INDEX
from shardwise.checkpoint.storage.chunks import read_whole
from shardwise.checkpoint.storage.root import Buffer, Root
from shardwise.config import FamilyConfig, checked_model_section
from shardwise.config.hugging_face import from_hugging_face
from shardwise.config.hugging_face_names import WITHOUT_GRADIENT

MASTER = "master"
_DTYPE_FIELDS = ("torch_dtype", "dtype")  # the names that releases of `transformers` give the dtype in `config.json`


class Export:
    """An export, planned from the manifest before anything is written.

    Attributes:
        weights: weights in the order of the checkpoint's files.
        masters: number of weights that are taken from stored float32 masters.

    Args:
        dtype: dtype of all floating-point weights (a name in `FLOATS`); None: as they are stored. A weight that is to
            be cast is taken from its float32 master, if the checkpoint has one.

    Raises:
        ConfigError: `folder` is no checkpoint. StoreError: it cannot be read, or is damaged.
    """

    def __init__(self, folder: Root, dtype: str | None = None) -> None:
        if not (folder / MANIFEST).exists():
            raise ConfigError(f"{folder} must be a checkpoint, and it has no {MANIFEST}")
        self._folder = folder
        self._manifest = Manifest.read(folder)
        self._stored = StoredTensors(folder, self._manifest.tensors, self._manifest)
        self._target = None if dtype is None else FLOATS[dtype]
        self.step = self._manifest.step
        self.masters = 0
        weights = self._manifest.tensors.get(MODEL, {})
        # In the order of their bytes a disk reads the weights in one go.
        positions = {
            name: min(((p.file, p.offset) for p in entry.pieces), default=(0, 0)) for name, entry in weights.items()
        }
        self.weights = [self._weight(name) for name in sorted(weights, key=lambda name: positions[name])]
        if not self.weights:
            raise ConfigError(f"{folder} must hold weights: it has none")

    @property
    def dtypes(self) -> Counter[str]:
        """dtype as torch names it → bytes of weights."""
        sizes: Counter[str] = Counter()
        for weight in self.weights:
            sizes[FLOATING.get(weight.dtype, weight.dtype)] += weight.nbytes
        return sizes

    @property
    def nbytes(self) -> int:
        return sum(self.dtypes.values())

    def write(self, parent: Root, name: str, max_shard_bytes: int = writing.MAX_SHARD_BYTES) -> writing.WrittenFolder:
        """Write the folder `name` in `parent`, which appears complete or not at all.

        Raises:
            ConfigError: it exists. DamageError: what is read does not match its checksums. RunError: a value is beyond
            the range of float16. StoreError: out of space, or the like.
        """
        return writing.write_folder(parent, name, self.weights, self.small_files(), max_shard_bytes=max_shard_bytes)

    def _weight(self, name: str) -> writing.StreamedWeight:
        """A weight in the dtype of the export, from its master where that saves a rounding."""
        entry = self._manifest.tensors[MODEL][name]
        # Integers, such as quantized weights, stay as they are.
        target = entry.dtype
        if self._target is not None and entry.dtype in FLOATING and not name.endswith(WITHOUT_GRADIENT):
            target = self._target
        state = MODEL
        if target != entry.dtype and name in self._manifest.tensors.get(MASTER, {}):
            state = MASTER
            self.masters += 1
        return writing.StreamedWeight(name, target, entry.shape, partial(self._read, state, name, target))

    def _read(self, state: str, name: str, target: str) -> Iterator[Buffer]:
        entry = self._manifest.tensors[state][name]
        for box in box_segments(entry.shape, writing.STREAM_BYTES // DTYPES[entry.dtype].itemsize):
            values = self._stored.read(state, name, box)
            # A value beyond the range would become infinite without a word.
            if target == "F16" and cast_overflows(values, entry.dtype, target):
                raise RunError(
                    f"{name} has values beyond the range of float16 (65,504): export to bfloat16 or float32 instead"
                    f"{see('checkpoints#beyond-float16')}"
                )
            yield cast_values(values, entry.dtype, target).tobytes()

    @cached_property
    def described(self) -> dict[str, Any]:
        """The fields of the checkpoint's `config.json`; ConfigError if there is none, DamageError if it is damaged."""
        entries = {entry.path: entry for entry in self._manifest.files}
        if writing.CONFIG not in entries and not self._manifest.config:
            raise ConfigError(
                f"{self._folder} must have a {writing.CONFIG}: its loop saved none; save it by "
                "shardwise.save_checkpoint with config=, which describes the model"
            )
        if writing.CONFIG not in entries:
            raise ConfigError(f"{self._folder} must have a {writing.CONFIG}: it has {listing(sorted(entries)[:6])}")
        try:
            described = json_value(read_whole(self._folder, entries[writing.CONFIG]))
            if not isinstance(described, dict):
                raise ValueError("it is no JSON object")
        except ValueError as error:
            raise DamageError(f"{self._folder / writing.CONFIG} is damaged: {error}") from None
        return described

    @property
    def model(self) -> FamilyConfig:
        """The model that `config.json` describes; ConfigError if it is of no family."""
        return checked_model_section(
            from_hugging_face(self.described, str(self._folder / writing.CONFIG)), str(self._folder / writing.CONFIG)
        )

    def small_files(self) -> dict[str, bytes]:
        """Name → content of the other files; `config.json` names the dtype of the most bytes of weights."""
        ((dtype, _),) = self.dtypes.most_common(1)
        dtype_fields = [field for field in _DTYPE_FIELDS if field in self.described] or ["torch_dtype"]
        # The index is left out: the export has other shards. A card of the checkpoint takes the place of the one here.
        files = {
            writing.CONFIG: writing.to_json({**self.described, **dict.fromkeys(dtype_fields, dtype)}),
            MODEL_CARD: model_card(self._manifest),
        }
        for entry in self._manifest.files:
            if not entry.path.endswith(".safetensors") and entry.path not in (writing.CONFIG, INDEX):
                files[entry.path] = read_whole(self._folder, entry)
        return with_readable_tokenizer(files, pairs=self.described.get("model_type") == "bert")
