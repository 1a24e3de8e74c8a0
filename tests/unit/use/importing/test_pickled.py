"""Files of torch.save: tensors and plain values come out, code never runs."""

import collections
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise_use.importing import pickled


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(("kind", "zipped"), [("system", True), ("eval", False), ("open", True)])
def test_code_is_refused_and_does_not_run(tmp_path: Path, kind: str, zipped: bool) -> None:
    mark = tmp_path / "ran"
    attacks: dict[str, tuple[Any, ...]] = {
        "system": (os.system, f"touch {mark}"),
        "eval": (eval, f"open({str(mark)!r}, 'w')"),
        "open": (open, str(mark), "w"),
    }
    file = tmp_path / "model_optim_rng.pt"
    state = {"model": {"a": torch.ones(2)}, "args": Malicious(*attacks[kind])}
    torch.save(state, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ConfigError) as caught:
        pickled.load_pickled(file)
    assert not mark.exists()
    text = str(caught.value)
    assert text.startswith(f"{file} is refused: ")
    assert zipped or text.endswith("; no code of it was run")
    assert "\n" not in text
    assert "weights_only" not in text
    pickle.loads(pickle.dumps(Malicious(*attacks["open"]))).close()  # it would have run
    assert mark.exists()


def test_values_of_new_and_old_files(tmp_path: Path) -> None:
    import numpy as np

    file = tmp_path / "state.pt"
    values = np.random.RandomState(0).get_state()
    torch.save({"a": torch.arange(3.0), "rng": values, "plain": [1, "two", None, 3.0]}, file)
    found = pickled.load_pickled(file)
    assert torch.equal(found["a"], torch.arange(3.0))
    assert found["plain"] == [1, "two", None, 3.0]
    assert isinstance(found["rng"][1], pickled._StandIn)
    assert not vars(found["rng"][1])
    file = tmp_path / "state.pt"
    state = collections.OrderedDict(a=torch.arange(3.0), b=torch.ones(2, 2).bfloat16())
    torch.save(state, file, _use_new_zipfile_serialization=False)
    found = pickled.load_pickled(file)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_files_that_are_none(tmp_path: Path) -> None:
    for content, says in (
        (b"", "must be a file that torch.save has written, and is none"),
        (b"no pickle", "must be a file that torch.save has written, and is none"),
        (b"PK\x03\x04 cut short", "is truncated: it begins as a zip archive, and has no end of one"),
        (b"\x80\x02 no pickle", "is refused: "),
    ):
        file = tmp_path / "state.pt"
        file.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            pickled.load_pickled(file)
        assert str(caught.value).startswith(f"{file} {says}")


def test_whatever_bytes_are_wrong_is_told(tmp_path: Path) -> None:
    """Torch's readers have errors of many kinds for them."""
    file = tmp_path / "state.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("notes.txt", "of no model")
    other = file.read_bytes()
    torch.save({"a": torch.ones(1000)}, file)
    spanned = bytearray(file.read_bytes())
    spanned[spanned.rindex(b"PK\x06\x07") + 16] = 2  # the number of disks
    torch.save({"a": torch.ones(1000)}, file, _use_new_zipfile_serialization=False)
    old = file.read_bytes()
    key = pickle.loads(old[old.rindex(b"\x80\x02") : -8 - 4000])[0].encode()
    for content in (other, bytes(spanned), old[:30], old[:60], old[:-500], old.replace(key, b"9" * len(key), 1)):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"state\.pt is truncated or no file of torch\.save \(.+\)$"):
            pickled.load_pickled(file)


@pytest.mark.parametrize("number", ["../secret", -1])
def test_a_reference_leads_to_no_other_file(number: Any, tmp_path: Path) -> None:
    reference = pickled._TensorReference()
    reference.tid = number
    with pytest.raises(ConfigError, match=rf"state\.pt refers to a tensor by {number!r}, which must be a number"):
        pickled.follow_reference(reference, tmp_path / "state.pt")
