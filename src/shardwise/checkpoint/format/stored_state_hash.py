"""The hash of the state that a checkpoint holds, computed from its files, against the one in its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.base.errors import listing
from shardwise.base.tensor_box import box_segments
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.stored_tensors import StoredTensors, ordered_names
from shardwise.checkpoint.storage.root import Root
from shardwise.optim.state_digest import StateHash, box_sum, digest_place

_ELEMENTS_AT_ONCE = 2**20
"""Elements in memory at once, 8 MiB as integers of 64 bits."""


def state_hash_problems(folder: Root, manifest: Manifest) -> list[str]:
    """Read the tensors of a checkpoint's state hash; returns what contradicts the hash, one sentence at most.

    Raises:
        StoreError: a tensor cannot be read, or is damaged.
    """
    recorded = manifest.state_hash
    if recorded is None:
        return []
    sums = recorded.get("sums")
    seed = manifest.rng.get("seed")
    if not isinstance(sums, Mapping) or not _are_sums(sums, manifest) or not isinstance(seed, int):
        return [f"{folder}: the state hash in its manifest must name tensors of the checkpoint, and the seed be there"]
    place = digest_place(manifest.step, manifest.samples, manifest.tokens, manifest.position, seed)
    stored = StoredTensors(folder, manifest.tensors, manifest)
    computed = StateHash(
        place, {state: {name: _stored_sum(stored, state, name) for name in names} for state, names in sums.items()}
    )
    found_sums = computed.recorded()["sums"]
    differing = [
        f"{state}/{name}" for state, names in sums.items() for name in names if names[name] != found_sums[state][name]
    ]
    if not differing and computed.text == recorded.get("hash"):
        return []
    subject = "its place in the training" if not differing else listing(ordered_names(differing), most=5)
    return [
        f"{folder}: the state hash of its files ({computed.text}) must be that of the training "
        f"({recorded.get('hash')}): it differs in {subject}"
    ]


def _stored_sum(stored: StoredTensors, state: str, name: str) -> int:
    shape = stored.states[state][name].shape
    boxes = box_segments(shape, _ELEMENTS_AT_ONCE)
    return sum(box_sum(stored.read(state, name, box), shape, box) for box in boxes) % 2**64


def _are_sums(sums: Mapping[str, Any], manifest: Manifest) -> bool:
    for state, names in sums.items():
        known = manifest.tensors.get(state, {})
        if not isinstance(names, Mapping) or not names.keys() <= known.keys():
            return False
        if not all(isinstance(text, str) for text in names.values()):
            return False
    return True
