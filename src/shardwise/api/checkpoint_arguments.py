"""The mesh and the checks of arguments that `save_checkpoint` and `load_checkpoint` share.

A problem is a ConfigError that says what is wrong, on every rank, and no AttributeError later.
"""

from __future__ import annotations

from collections import Counter
from numbers import Integral
from pathlib import Path

from torch import nn

from shardwise.api.arguments import config_problems, shown_value
from shardwise.base.errors import ConfigError, listing
from shardwise.base.units import counted
from shardwise.checkpoint.canonical_tensors import canonical_shapes
from shardwise.checkpoint.format.manifest import TensorEntry
from shardwise.checkpoint.format.stored_tensors import tensor_mismatches
from shardwise.checkpoint.load_weights import canonical_tensor_shapes
from shardwise.checkpoint.restore import tied_ends
from shardwise.checkpoint.storage.root import Root
from shardwise.config import FamilyConfig, weight_names
from shardwise.distributed import collectives
from shardwise.distributed.collectives import raise_on_all_ranks
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import placements, unplaced_state
from shardwise.models.user_model import storage_problems
from shardwise.optim.state import unstorable_states
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.train.rank_agreement import require_equal

_world_meshes: list[Mesh] = []
"""The mesh of the world of the last call without `mesh=`: at most one. Only `mesh_of` reads it."""
_SHOWN = 4
_MOST_STEPS = 10**18  # no checkpoint is found again whose name has more digits


def mesh_of(mesh: Mesh | None) -> Mesh:
    """The `mesh` argument of a program's call on checkpoints; None: data parallelism alone over the present world.

    Collective where that is new. A process group and its sockets stay until the process ends: a world has one mesh.

    Raises:
        ConfigError: it is no mesh.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is not None:
        raise ConfigError(f"mesh ({shown_value(mesh)}) must be a shardwise.Mesh, or None for data parallelism alone")
    world = Group.world().process_group
    if world is None:
        return Mesh()
    if not any(cached.world.process_group is world for cached in _world_meshes):
        _world_meshes[:] = [Mesh()]
    return _world_meshes[0]


def require_saveable(model: object, optimizer: object, step: object, config: object, mesh: Mesh) -> None:
    """Raise ConfigError, with every problem, for arguments of a program of which no checkpoint can be made."""
    problems = _problems(model, optimizer, mesh)
    if isinstance(model, nn.Module):
        problems += storage_problems(model)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        unstorable = unstorable_states(optimizer)
        if unstorable:
            problems.append(
                f"the state of {optimizer.optimizer_class.__name__} must be tensors of the parameters' shapes and "
                f"numbers, which a checkpoint holds, but has {listing(unstorable, most=_SHOWN)}: keep it elsewhere, or "
                "in the optimizer's parameter groups, and save it yourself"
            )
    if isinstance(step, bool) or not isinstance(step, Integral) or not 0 <= int(step) < _MOST_STEPS:
        problems.append(f"step ({shown_value(step)}) must be the number of updates done, a whole number from 0 on")
    if config is not None:
        problems += config_problems(config)
    if problems:
        raise ConfigError(problems)


def require_one_save(root: Root, step: int, model: nn.Module, mesh: Mesh) -> None:
    """Raise ConfigError, on every rank, where ranks give `save_checkpoint` another step, folder or parameters."""
    folder = str(Path(root.path).absolute()) if root.is_local else root.shown
    require_equal({"step": step, "folder": folder}, mesh.world, places=("folder",) if root.is_local else ())
    tensors = {f"{piece.name} {list(piece.shape)}" for _, _, record in placements(model) for piece in record.pieces}
    # The ranks of one pipeline stage must have the same parameters; other stages have others.
    differing = sorted(tensors ^ collectives.broadcast_object(tensors, mesh.stage))
    problems: list[str] = []
    if differing:
        problems.append(
            "the model's parameters must be the same on all ranks: a rank and the first do not both have "
            f"{listing(differing, most=_SHOWN)}"
        )
    raise_on_all_ranks(problems, mesh.world)


def require_one_model(model: nn.Module, family: FamilyConfig | None, mesh: Mesh) -> None:
    """Raise ConfigError where `save_checkpoint` is given stages that share a name, or `family` of another model.

    Collective over the pipeline. A model of the user's own has no family: its configuration names a class, which is not
    called here.
    """
    # Both ends of a pipeline have a tied weight under one name; any other name must be of one stage.
    local_names: dict[str, None] = {}
    for _, _, record in placements(model):
        for piece in record.pieces:
            is_tied = tied_ends(piece, mesh).size > 1
            if piece.box.numel and not is_tied:
                local_names[piece.name] = None
    stages_with: Counter[str] = Counter()
    for names in collectives.all_gather_objects(local_names, mesh.pp):
        stages_with.update(names.keys())
    repeated = [name for name, stages in stages_with.items() if stages > 1]
    if repeated:
        raise ConfigError(
            f"pipeline stages must name their parameters differently, and several have "
            f"{listing(repeated, most=_SHOWN)}: name the modules of each stage as the whole model does"
        )
    if family is None:
        return
    shapes = canonical_tensor_shapes(model, mesh)
    config_shapes = canonical_shapes(family)
    # The model may spell its names otherwise, as Hugging Face's folders do.
    canonical_names = weight_names(family.family).canonical(list(shapes), set(config_shapes))
    canonical_model = {canonical_names.get(name, name): shape for name, shape in shapes.items()}
    config_tensors = {name: TensorEntry(shape, "F32", ()) for name, shape in config_shapes.items()}
    problems = tensor_mismatches(f"config ({family.family})", canonical_model, config_tensors)
    if problems:
        problems[-1] += "; give the configuration of the model that is saved, or none"
        raise ConfigError(problems)


def require_loadable(model: object, optimizer: object | None, mesh: Mesh) -> None:
    """Raise ConfigError, with every problem, for a call's model and optimizer that can load no checkpoint."""
    if problems := _problems(model, optimizer, mesh, needs_optimizer=False):
        raise ConfigError(problems)


def _problems(model: object, optimizer: object, mesh: Mesh, *, needs_optimizer: bool = True) -> list[str]:
    problems: list[str] = []
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
        problems += _optimizer_problems(model, optimizer, mesh)
    return problems


def _optimizer_problems(model: nn.Module, optimizer: ZeroRedundancyOptimizer, mesh: Mesh) -> list[str]:
    problems: list[str] = []
    trained = {parameter for bucket in optimizer.buckets for parameter in bucket.parameters}
    parameters = dict(model.named_parameters())
    reasons: list[str] = []
    if untrained := [name for name, p in parameters.items() if p.requires_grad and p.numel() and p not in trained]:
        reasons.append(f"it lacks {listing(untrained, most=_SHOWN)}")
    if foreign := len(trained - set(parameters.values())):
        reasons.append(f"it holds {counted(foreign, 'parameter')} that the model lacks")
    if reasons:
        problems.append(f"the optimizer must hold the model's parameters: {', and '.join(reasons)}")
    axes = {"data-parallel": (optimizer.group, mesh.replicas), "tensor-parallel": (optimizer.tensor, mesh.tp)}
    for axis, (of_optimizer, of_mesh) in axes.items():
        if max(of_optimizer.size, of_mesh.size) > 1 and of_optimizer.ranks != of_mesh.ranks:
            problems.append(
                f"the {axis} ranks of the optimizer ({listing(of_optimizer.ranks)}) must be those of mesh "
                f"({listing(of_mesh.ranks)}): give mesh= here and to the optimizer, the same"
            )
    return problems
