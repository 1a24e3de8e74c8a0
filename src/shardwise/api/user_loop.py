"""What the calls on checkpoints of one's own loop share: their mesh, and what they require of their arguments.

A problem is a ConfigError that says what is wrong, on every rank, and no AttributeError later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import TypeVar, cast

from torch import nn

from shardwise.api.arguments import config_problems, shown_value
from shardwise.base.errors import ConfigError, ShardwiseError, listing
from shardwise.base.units import counted
from shardwise.checkpoint.format.manifest import TensorEntry
from shardwise.checkpoint.format.tensors import mismatches
from shardwise.checkpoint.importing.foreign_model import canonical_shapes
from shardwise.checkpoint.load import tensor_shapes
from shardwise.checkpoint.reading import other_ends
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, OwnConfig
from shardwise.distributed import collectives
from shardwise.distributed.agreement import agree
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import placements, unplaced_state
from shardwise.models.hugging_face_names import spelling
from shardwise.models.user_model import storage_problems
from shardwise.optim.state import unstorable_states
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.train.same_on_ranks import require_equal

_R = TypeVar("_R")
_of_worlds: list[Mesh] = []
"""The mesh of the world of the last call without `mesh=`: at most one. Only `mesh_of` reads it."""
_SHOWN = 4
_MOST_STEPS = 10**18
"""No checkpoint is found again whose name has more digits."""


def mesh_of(given: Mesh | None) -> Mesh:
    """The mesh of a call; None: data parallelism alone over the present world. Collective where that is new.

    A process group and its sockets stay until the process ends, so a world has one mesh for all calls.

    Raises:
        ConfigError: it is no mesh.
    """
    if isinstance(given, Mesh):
        return given
    if given is not None:
        raise ConfigError(f"mesh ({shown_value(given)}) must be a shardwise.Mesh, or None for data parallelism alone")
    world = Group.world().process_group
    if world is None:
        return Mesh()
    if not any(made.world.process_group is world for made in _of_worlds):
        _of_worlds[:] = [Mesh()]
    return _of_worlds[0]


def on_first_rank(work: Callable[[], _R], world: Group) -> _R:
    """What some work gives on the first rank, on every rank; its ShardwiseError is raised on every rank. Collective."""
    done: _R | None = None
    problem: ShardwiseError | None = None
    if world.rank == 0:
        try:
            done = work()
        except ShardwiseError as error:
            problem = error
    done, problem = collectives.broadcast_object((done, problem), world)
    if problem is not None:
        raise problem
    return cast("_R", done)


def require_saveable(model: object, optimizer: object, step: object, config: object, mesh: Mesh) -> None:
    """Raise ConfigError, with every problem, for what no checkpoint can be made of."""
    problems = _problems(model, optimizer, mesh)
    if isinstance(model, nn.Module):
        problems += storage_problems(model)
    if isinstance(optimizer, ZeroRedundancyOptimizer) and (unstorable := unstorable_states(optimizer)):
        problems.append(
            f"the state of {optimizer.optimizer_class.__name__} must be tensors of the parameters' shapes and numbers, "
            f"which a checkpoint holds, but has {listing(unstorable, most=_SHOWN)}: keep it elsewhere, or in the "
            "optimizer's parameter groups, and save it yourself"
        )
    if isinstance(step, bool) or not isinstance(step, Integral) or not 0 <= int(step) < _MOST_STEPS:
        problems.append(f"step ({shown_value(step)}) must be the number of updates done, a whole number from 0 on")
    if config is not None:
        problems += config_problems(config, ", or None")
    if problems:
        raise ConfigError(problems)


def require_one_save(root: Root, step: int, model: nn.Module, mesh: Mesh) -> None:
    """Raise ConfigError, on every rank, where ranks save another step, to another folder, or other parameters."""
    place = str(Path(root.path).absolute()) if root.is_local else root.shown
    require_equal({"step": step, "folder": place}, mesh.world, places=("folder",) if root.is_local else ())
    own = {f"{piece.name} {list(piece.shape)}" for _, _, record in placements(model) for piece in record.pieces}
    first = collectives.broadcast_object(own, mesh.stage)
    differences = [
        f"a rank {verb} {listing(sorted(names), most=_SHOWN)}"
        for verb, names in (("lacks", first - own), ("has", own - first))
        if names
    ]
    problem = f"the model's parameters must be the same on all ranks: unlike the first, {' and '.join(differences)}"
    agree([problem] if differences else [], mesh.world)


def require_one_model(model: nn.Module, config: Config | None, mesh: Mesh) -> None:
    """Raise ConfigError where stages share a name, or `config` is of another model. Collective over the pipeline.

    The configuration of a model of the user's own names a class, which is not called here, so it is not compared.
    """
    alone = [
        piece.name
        for _, _, record in placements(model)
        for piece in record.pieces
        if piece.box.numel and other_ends(piece, mesh).size == 1
    ]
    everywhere = Counter(
        name for names in collectives.all_gather_objects(dict.fromkeys(alone), mesh.pp) for name in names
    )
    if twice := [name for name, stages in everywhere.items() if stages > 1]:
        raise ConfigError(
            f"pipeline stages must name their parameters differently, and several have {listing(twice, most=_SHOWN)}: "
            "name the modules of each stage as the whole model does"
        )
    if config is None or isinstance(config.model, OwnConfig):
        return
    shapes, described = tensor_shapes(model, mesh.pp), canonical_shapes(config.model)
    canonical = spelling(config.model.family).canonical(list(shapes), set(described))
    renamed = {canonical.get(name, name): shape for name, shape in shapes.items()}
    stored = {name: TensorEntry(shape, "F32", ()) for name, shape in described.items()}
    if problems := mismatches(f"config ({config.model.family})", renamed, stored):
        problems[-1] += "; give the configuration of the model that is saved, or none"
        raise ConfigError(problems)


def require_loadable(model: object, optimizer: object | None, mesh: Mesh) -> None:
    """Raise ConfigError, with every problem, for what no checkpoint can be loaded into."""
    if problems := _problems(model, optimizer, mesh, needs_optimizer=False):
        raise ConfigError(problems)


def _problems(model: object, optimizer: object, mesh: Mesh, *, needs_optimizer: bool = True) -> list[str]:
    problems = []
    if not isinstance(model, nn.Module):
        problems.append(f"model ({shown_value(model)}) must be a torch.nn.Module")
    elif lost := unplaced_state(model):
        problems.append(
            f"the model must have no persistent buffers, but has {listing(lost, most=_SHOWN)}: a checkpoint holds "
            "parameters only, so register them by register_buffer(NAME, VALUE, persistent=False), and save them "
            "yourself if they change"
        )
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        if optimizer is not None or needs_optimizer:
            problems.append(
                f"optimizer ({shown_value(optimizer)}) must be a shardwise.ZeroRedundancyOptimizer, which wraps a "
                "class: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)"
            )
    elif isinstance(model, nn.Module):
        problems += _of_other_model(model, optimizer) + _of_other_mesh(optimizer, mesh)
    return problems


def _of_other_mesh(optimizer: ZeroRedundancyOptimizer, mesh: Mesh) -> list[str]:
    """Why the ranks of an optimizer are not those of a mesh."""
    axes = {"data-parallel": (optimizer.group, mesh.dp), "tensor-parallel": (optimizer.tensor, mesh.tp)}
    return [
        f"the {axis} ranks of the optimizer ({listing(held.ranks)}) must be those of mesh ({listing(wanted.ranks)}): "
        "give mesh= here and to the optimizer, the same"
        for axis, (held, wanted) in axes.items()
        if held.ranks != wanted.ranks and max(held.size, wanted.size) > 1
    ]


def _of_other_model(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> list[str]:
    """Why the trained parameters of an optimizer are not those of a model."""
    held = {parameter for bucket in optimizer.buckets for parameter in bucket.parameters}
    own = dict(model.named_parameters())
    lacked = [name for name, p in own.items() if p.requires_grad and p.numel() and p not in held]
    foreign = len(held - set(own.values()))
    found = [f"it lacks {listing(lacked, most=_SHOWN)}"] if lacked else []
    if foreign:
        found.append(f"it holds {counted(foreign, 'parameter')} that the model lacks")
    if not found:
        return []
    return [
        f"the optimizer must hold the model's parameters: {', and '.join(found)}; make it of this model's parameters"
    ]
