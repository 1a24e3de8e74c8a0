"""What an import must have made of a model."""

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.verify import verify_checkpoint
from shardwise.checkpoint.storage.root import Root
from shardwise_use.importing.imported_model import ImportedModel, write_imported_checkpoint
from tests.hugging_face import open_folder


def write(opened: ImportedModel, root: Path, **options: Any) -> Path:
    """Write the checkpoint and verify it."""
    folder = write_imported_checkpoint(opened, Root.of(root), **options).folder
    assert verify_checkpoint(folder).sound
    manifest = Manifest.read(folder)
    assert (manifest.step, manifest.samples, manifest.optimizer) == (0, 0, None)
    assert manifest.config["model"] == opened.config.model_dump(mode="json")
    return folder.local()


@contextmanager
def in_module(name: str, kind: type) -> Iterator[None]:
    """`kind` as a class of the module `name`, which is gone when what was pickled inside is read."""
    names = [name[:at] for at, letter in enumerate(name) if letter == "."] + [name]
    kind.__module__, kind.__qualname__ = name, kind.__name__
    modules = {each: types.ModuleType(each) for each in names}
    setattr(modules[name], kind.__name__, kind)
    sys.modules |= modules
    try:
        yield
    finally:
        for each in names:
            del sys.modules[each]


def states_of(opened: ImportedModel) -> dict[str, dict[str, torch.Tensor]]:
    """State → canonical name → values; the weights are the state `model`."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for each in opened.tensors:
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[each.dtype]
        data = torch.frombuffer(bytearray(b"".join(map(bytes, each.read()))), dtype=dtype)
        states.setdefault(each.state, {})[each.name] = data.view(each.shape)
    return states


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """All tensors of both, to the bit."""
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def problems(action: Callable[..., object], *arguments: Any, **names: Path) -> list[str]:
    """All that is told of wrong input, with names in place of the paths of these folders."""
    with pytest.raises(ConfigError) as caught:
        action(*arguments)
    told = caught.value.problems
    for name, path in names.items():
        told = [each.replace(str(path), name) for each in told]
    return told


def changed(file: Path, change: Callable[[Any], object]) -> None:
    """Change what torch has saved in a file."""
    saved = torch.load(file, weights_only=False)
    change(saved)
    torch.save(saved, file)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_model(opened: ImportedModel, original: Any, at: Path) -> None:
    """Tensors equal to the bit to what `original` saved in `at`, and logits equal where transformers opens both."""
    folder = write(opened, at / "ours")
    assert_equal(weights(folder), weights(at / "saved"))
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        outputs, expected = open_folder(folder).float()(ids), original(ids)
    for name in ("logits", "prediction_logits", "seq_relationship_logits"):  # BERT has the latter two
        if name in expected:
            torch.testing.assert_close(outputs[name], expected[name], rtol=1e-5, atol=1e-5)
