"""Files of `torch.save`, opened so that no code in them can run.

torch's restricted unpickler makes tensors and plain values. Of other classes it makes an empty stand-in where their
name is known to be harmless and unneeded; any other name is refused before anything is read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.base.errors import ConfigError, error_text, listing, see
from shardwise.base.files import reason_of


class _StandIn:
    """Stands for an object whose class is never imported: its content is dropped."""

    # Python's own `__new__` takes any arguments where the class has an `__init__`.
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __repr__(self) -> str:
        return "an object"


class PickledRecord(_StandIn):
    """Stands for a pickled object whose class is never imported; `value`: the value of an enumeration."""

    def __init__(self, *arguments: object, **_: object) -> None:
        self.value = arguments[0] if arguments else None
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        # An object that was made by its class alone, without a call, has no fields before.
        self.value = None
        self.fields = dict(state) if isinstance(state, dict) else {}


class _TensorReference:
    """The reference of torch_xla, or of a program that copied it, to a tensor that has a file of its own."""

    tid: object = None

    def __setstate__(self, state: object) -> None:
        # The state of an object with slots is a pair: its dictionary or None, and its slots.
        for fields in state if isinstance(state, tuple) else (state,):
            if isinstance(fields, dict):
                self.tid = fields.get("tid", self.tid)


# Classes that training programs save beside weights: arguments, random number generators, TransformerEngine's state.
_UNNEEDED = (
    "_codecs.encode", "_io.BytesIO", "builtins.getattr", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
    "numpy.ndarray", "numpy.dtype", "signal.Signals", "types.SimpleNamespace", "torch._C._VariableFunctionsClass",
)  # fmt: skip
_UNNEEDED_PACKAGES = ("megatron.", "transformer_engine.", "nemo.", "pytorch_lightning.", "torchmetrics.", "omegaconf.")
_CLASSES: dict[str, type] = {
    "argparse.Namespace": argparse.Namespace,
    "torch_xla.utils.serialization.TensorReference": _TensorReference,
    "nemo.collections.nlp.parts.serialization.TensorReference": _TensorReference,
    **dict.fromkeys(_UNNEEDED, _StandIn),
}


def load_pickled(path: Path, records: tuple[str, ...] = (), *, content: bytes | None = None, name: str = "") -> Any:
    """The content of a file of `torch.save`; tensors stay in the file until they are read, where the format allows it.

    Args:
        records: packages, such as `transformers.`, each of whose objects becomes a `PickledRecord`.
        content: a part of the file that is such a file by itself, with its `name` for messages.

    Raises:
        ConfigError: it was not written by `torch.save`, cannot be read, or names what could run code.
    """
    classes = _CLASSES
    where = f"{path} ({name})" if name else str(path)

    def source() -> Any:
        return str(path) if content is None else io.BytesIO(content)

    try:
        # torch before 1.6 wrote another format, which cannot be mapped into memory.
        is_zip = zipfile.is_zipfile(source())
        if not is_zip:
            _require_pickle(path)
        else:
            # The names are read from the pickle without running it, so that all that are refused are named at once.
            names = torch.serialization.get_unsafe_globals_in_checkpoint(source())
            classes = {name: _StandIn for name in names if name.startswith(_UNNEEDED_PACKAGES)} | _CLASSES
            classes |= {name: PickledRecord for name in names if records and name.startswith(records)}
            if refused := sorted(set(names) - set(classes)):
                raise ConfigError(
                    f"{where} is refused: beside tensors and plain values its pickle names {listing(refused)}, by "
                    "which opening it could run code; none was run. Save it again without these objects"
                    f"{see('checkpoints#pickle-refused')}"
                )
        with torch.serialization.safe_globals([(kind, name) for name, kind in classes.items()]):
            return torch.load(source(), map_location="cpu", weights_only=True, mmap=is_zip and content is None)
    except ConfigError:
        raise
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{where} is refused: {unpickling_reason(error)}; no code of it was run") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from None
    except Exception as error:  # noqa: BLE001  what torch's readers raise for bytes they do not expect: almost any
        raise ConfigError(f"{where} is truncated or no file of torch.save ({unpickling_reason(error)})") from None


def follow_reference(value: Any, path: Path) -> Any:
    """A value of a pickled file, or the tensor of a reference; ConfigError: a reference names no readable file."""
    if not isinstance(value, _TensorReference):
        return value
    if not isinstance(value.tid, int) or value.tid < 0:
        raise ConfigError(f"{path} refers to a tensor by {value.tid!r}, which must be a number")
    return load_pickled(path.with_name(f"{path.name}.tensors") / f"tensor_{value.tid}.pt")


@contextlib.contextmanager
def content_errors(problem: str, fix: str = "") -> Iterator[None]:
    """Inside, raise errors of an imported file's unexpected content as a ConfigError of `problem`, reason and fix."""
    try:
        yield
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise ConfigError(f"{problem}: {error_text(error)}{fix}") from None


def _require_pickle(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(2)
    if start == b"PK":
        raise ConfigError(f"{path} is truncated: it begins as a zip archive, and has no end of one")
    if start[:1] != pickle.PROTO:
        raise ConfigError(f"{path} must be a file that torch.save has written, and is none")


def unpickling_reason(error: Exception) -> str:
    """The reason in torch's message on a pickle, without its advice to open the file in an unsafe way."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if "GLOBAL" in line or "nsupported" in line] or lines or [""]
    return reasons[0].partition(". ")[0].rstrip(".") or type(error).__name__
