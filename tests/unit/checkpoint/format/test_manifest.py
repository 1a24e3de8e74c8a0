"""The manifest: what is written is read back, any changed byte is found, and a stranger's is not believed."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import xxhash

from shardwise.base.errors import DamageError
from shardwise.checkpoint.format.manifest import MANIFEST, Manifest, ManifestError
from shardwise.checkpoint.storage.root import Root
from tests.stored import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints"), ranks=3, rng={"seed": 1, "ä": [1e-05, 0.1, None]})


def text_of(folder: Root) -> str:
    return (folder / MANIFEST).read().decode()


def signed(plain: dict[str, Any]) -> str:
    """A manifest with these values and a digest that fits them, as an attacker would write it."""
    plain = {key: value for key, value in plain.items() if key != "digest"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    digest = f"xxh3_128:{xxhash.xxh3_128_hexdigest(text.encode())}"
    return json.dumps({**plain, "digest": digest}, sort_keys=True, separators=(",", ":")) + "\n"


def test_what_is_written_is_read_back_and_every_changed_byte_is_found(folder: Root) -> None:
    manifest = Manifest.read(folder)
    assert (manifest.step, manifest.samples, manifest.rng["ä"]) == (100, 800, [1e-05, 0.1, None])
    assert Manifest.from_json(manifest.to_json(), "x") == manifest
    assert set(manifest.tensors) == {"model", "exp_avg", "exp_avg_sq", "master"}
    assert manifest.tensors["model"]["embed.weight"].shape == (11, 6)
    text = manifest.to_json()
    assert text == signed(json.loads(text)), "of its parts comes what a plain writer of JSON makes of the same values"
    # Older manifests have them in `schedule`, and still older ones not at all.
    plain = json.loads(text_of(folder))
    del plain["losses"]
    assert Manifest.from_json(signed(plain), "x").losses == ()
    plain["schedule"]["recent_losses"] = [2.5, 2]
    older = Manifest.from_json(signed(plain), "x")
    assert older.losses == (2.5, 2)
    assert "recent_losses" not in older.schedule
    assert Manifest.from_json(older.to_json(), "x") == older
    text = text_of(folder)
    chance = random.Random(0)
    places = {chance.randrange(len(text)) for _ in range(300)} | set(range(40)) | {len(text) - 1}
    for at in places:
        changed = chr(ord(text[at]) ^ 1 << chance.randrange(7))
        with pytest.raises((DamageError, ManifestError)):
            Manifest.from_json(text[:at] + changed + text[at + 1 :], "x")
    for at in (0, 1, len(text) // 2, len(text) - 2, len(text) - 1):
        with pytest.raises(DamageError):
            Manifest.from_json(text[:at], "x")


def change_file(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda plain: plain["files"][0].update(values)


def change_tensor(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda plain: plain["tensors"]["model"]["embed.weight"].update(values)


CRAFTED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a future version": (
        lambda plain: plain.update(version=2, versions={"shardwise": "9.1"}, tensors="another way"),
        r"format version of x \(2\) .* \(1\): it is read by shardwise ≥ 9\.1",
    ),
    "parent": (change_file(path="../secret"), "must be a plain name"),
    "huge chunks": (change_file(chunk_bytes=2**40), "must be a power of two"),
    "huge file": (change_file(bytes=2**62), "checksums of 8 bytes"),
    "beyond the file": (change_tensor(pieces=[[0, 10**6, [0, 0], [11, 6]]]), "must lie in their files"),
    "no such file": (change_tensor(pieces=[[99, 0, [0, 0], [11, 6]]]), "in files that are listed"),
    "fractions": (change_tensor(shape=[1.5]), "whole numbers"),
    "dtype": (change_tensor(dtype="pickle"), r"dtype of model/embed.weight \('pickle'\)"),
    "shared bytes": (change_tensor(pieces=[[0, at, [at, 0], [1, 6]] for at in (0, 4)]), "must not share bytes"),
    "offset of truth": (change_tensor(pieces=[[0, True, [0, 0], [11, 6]]]), "\\[file, offset"),
    "beyond any number": (change_tensor(pieces=[[0, 2**64, [0, 0], [11, 6]]]), "\\[file, offset"),
    "a product beyond any number": (
        change_tensor(shape=[2**40, 2**40], pieces=[[0, 0, [0, 0], [2**40, 2**40]]]),
        "in their files",
    ),
    "escape sequence": (lambda plain: plain["tensors"].update(x={"\x1b[2J": {}}), "must be printable"),
    "truth": (lambda plain: plain.update(step=True), r"step \(True\) must be a whole number"),
    "loss": (lambda plain: plain.update(losses=["low"]), "losses must be a JSON array of numbers"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_manifest_is_not_believed(case: str, folder: Root) -> None:
    plain = json.loads(text_of(folder))
    change, text = CRAFTED[case]
    change(plain)
    with pytest.raises(ManifestError, match=text):
        Manifest.from_json(signed(plain), "x")


def test_what_is_no_manifest_or_too_large_is_damage(folder: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, problem in [("[" * 200_000, "it is no JSON"), ("[]", "its format must be shardwise-checkpoint")]:
        with pytest.raises(DamageError, match=f"^x is damaged: {problem}$"):
            Manifest.from_json(text, "x")
    # A file of some megabytes with nothing but small values would take gigabytes of memory.
    values = text_of(folder).count(",") + 1
    monkeypatch.setattr("shardwise.checkpoint.format.manifest.MAX_MANIFEST_VALUES", values)
    assert Manifest.read(folder).step == 100
    monkeypatch.setattr("shardwise.checkpoint.format.manifest.MAX_MANIFEST_VALUES", values - 1)
    monkeypatch.setattr("shardwise.checkpoint.format.manifest.json.loads", None)
    with pytest.raises(DamageError, match=rf"must have at most {values - 1:,} values, and it has about {values:,}"):
        Manifest.read(folder)
