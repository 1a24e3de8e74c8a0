"""Memory of flat tensors that is released between uses. Views of such a tensor stay, and are valid while it has memory.

A parameter whose memory is released refuses to be read, since a kernel would read memory that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, see
from shardwise.distributed import placement
from shardwise.distributed.torch_private import call_without_overrides


def has_memory(flat: Tensor) -> bool:
    """Return whether a flat tensor has memory."""
    return flat.untyped_storage().nbytes() > 0


def allocate(flat: Tensor) -> None:
    """Give a flat tensor memory, whose values are arbitrary."""
    flat.untyped_storage().resize_(flat.nbytes)


def release(flat: Tensor) -> None:
    """Release the memory of a flat tensor and of all its views."""
    flat.untyped_storage().resize_(0)


@torch.no_grad()
def draw_in_place(parameter: nn.Parameter) -> None:
    """Give a parameter memory of its own, and its values, if it was made without (`placement.make_parameter`)."""
    if not has_memory(parameter):
        allocate(parameter)
        placement.draw_deferred(parameter, parameter.zero_())


_METADATA = frozenset(
    {
        "__get__",
        "__set__",
        "__hash__",
        "size",
        "dim",
        "numel",
        "stride",
        "element_size",
        "is_floating_point",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "view_as",  # by which torch finds the node that accumulates the gradient
    }
)
"""Functions of torch that read no element of a parameter. `__get__` is that of properties, such as `shape`."""
_ALIASES = [getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH")]
"""Properties that are views of the elements."""


class ReleasedParameter(nn.Parameter):
    """The class of a parameter while its memory is released: functions that read its elements are refused."""

    is_released = True
    gathered_class: type[nn.Parameter]
    path: str
    """Name in its model."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _METADATA and func not in _ALIASES:
            return call_without_overrides(func, args, kwargs or {})
        paths = [arg.path for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, ReleasedParameter)]
        raise ConfigError(
            f"with optimizer.zero (3) the parameter {paths[0] if paths else 'of an operation'} must be read in the "
            "forward pass of the module that has it, a block, embedding or head, and it was read elsewhere, where its "
            "memory is released: read it there, or inside `with optimizer.gathered():`, or set optimizer.zero=2"
            f"{see('training#released-parameter')}"
        )


def mark_released(parameter: nn.Parameter) -> None:
    """Let a parameter refuse to be read."""
    if not isinstance(parameter, ReleasedParameter):
        gathered_class = type(parameter)
        parameter.__class__ = ReleasedParameter
        assert isinstance(parameter, ReleasedParameter)
        parameter.gathered_class = gathered_class


def mark_gathered(parameter: nn.Parameter) -> None:
    """Let a parameter be read again."""
    if isinstance(parameter, ReleasedParameter):
        parameter.__class__ = parameter.gathered_class  # type: ignore[assignment]
