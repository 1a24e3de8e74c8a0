"""Makes a trainer and its parts from a configuration: the only place that knows all the parts, and so imports them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import filter as any_like
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.base.errors import ConfigError, StoreError, listing, nearest_name
from shardwise.checkpoint.format.manifest import MANIFEST, ManifestError
from shardwise.checkpoint.save import KeptCheckpoints, Saver
from shardwise.checkpoint.storage.checkpoint_choice import recorded_return
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, Layout, ModelConfig, OptimizerConfig, Precision, check_layout
from shardwise.config.sections import HooksConfig
from shardwise.data import EvaluationSets, PreparedData
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.placement import of_or_whole, placements
from shardwise.launch.stop_requests import make_stop_check
from shardwise.layers.embedding import ParallelLMHead
from shardwise.layers.linear import weights_of
from shardwise.layers.matmul import add_without_cast, let_products_add
from shardwise.models.build import add_step_hooks, model_adds_products, model_adds_products_in_graphs
from shardwise.optim.state import kept_bytes, state_bytes
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.pipeline.partition import stage_plan
from shardwise.pipeline.stages import Stages, build_stages
from shardwise.train.checkpoint_saving import CheckpointSaver
from shardwise.train.feed import Feed
from shardwise.train.hooks import user_loss, user_optimizer
from shardwise.train.model_checks import check_axes
from shardwise.train.rank_agreement import package_versions, raised_on_every_rank
from shardwise.train.reporter import Reporter
from shardwise.train.resume import Resumed
from shardwise.train.start import OpenedRun
from shardwise.train.step_record import Progress
from shardwise.train.trainer import Trainer
from shardwise.train.training import memory_copy_interval

if TYPE_CHECKING:
    from shardwise.pipeline.schedule import Pipeline
    from shardwise.train.memory_copies import MemoryCopies


def build_trainer(
    config: Config,
    mesh: Mesh,
    data: PreparedData,
    reporter: Reporter | None = None,
    progress: Progress | None = None,
    weights: Root | None = None,
    layout: Layout | None = None,
    sets: EvaluationSets | None = None,
) -> Trainer:
    """The trainer of this rank: feed, model shard, optimizer. Collective over the mesh.

    Args:
        weights: a checkpoint, whose masters are read if it has them, or a Hugging Face folder; None draws the weights.
        layout: the result of `check_layout` if the caller has it; None checks here.

    Raises:
        ConfigError: the weights are of another model, or damaged; a model of the user's own swaps axes.
        DataError: the data hold less than one sample.
    """
    layout = layout or check_layout(config, mesh.world.size)
    if config.is_bit_equal:
        devices.add_in_one_order(mesh.device, config.train.threads)
    if "flash_attention_3" in config.train.switches:
        devices.use_flash_attention_3(mesh.device)
    precision = config.precision.resolved(mesh.device.type != "cpu")
    feed = Feed.open(config, mesh, data, sets)
    dtype = _torch_dtype(precision.parameter)
    compilation = None
    if config.compile.enabled:
        from shardwise.train.compile.compiled_units import Compilation

        compilation = Compilation(config.compile, mesh.device, config.model, [mesh.tp, mesh.cp])
    loss = user_loss(config.hooks.loss)
    model = build_stages(config, layout, mesh, dtype=dtype, deferred=True, loss=loss, compiler=compilation)
    optimizer = build_optimizer(config, precision, model, mesh)
    _choose_accumulation(config, precision, model, mesh.device)
    if weights is not None:
        _load_weights(config.model, weights, model, optimizer, mesh)
    # Another size of micro-batch would be compiled for this check alone.
    if config.model.is_own and compilation is None:
        with optimizer.gathered(all_units=False):
            check_axes(model, feed.batches, mesh, config.model, config.parallel)
    return Trainer(
        config=config,
        layout=layout,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        feed=feed,
        progress=progress or Progress(),
        pipeline=_build_pipeline(config, layout, mesh, model, dtype),
        reporter=reporter,
        tokenizer_path=data.tokenizer_path,
        compilation=compilation,
    )


def _load_weights(
    config: ModelConfig, weights: Root, model: nn.Module, optimizer: ZeroRedundancyOptimizer, mesh: Mesh
) -> None:
    """Read the weights of a Hugging Face folder, or parameters and masters of a checkpoint. Collective."""
    # Costly to import, for a run that begins with weights alone.
    from shardwise.checkpoint.load_weights import load_hugging_face, require_finite_weights, require_model_weights
    from shardwise.checkpoint.restore import read_manifest, restore_checkpoint

    # All ranks take the same way, also where a network disk shows the file to some of them later than to others.
    if not collectives.broadcast_object((weights / MANIFEST).exists(), mesh.world):
        load_hugging_face(model, config, mesh, weights.local(), optimizer)
        return
    require_model_weights(config, weights, mesh.world)
    try:
        restore_checkpoint(weights, read_manifest(weights, mesh.world), model, optimizer, mesh, weights_only=True)
    except StoreError as error:
        if error.is_damage or isinstance(error, ManifestError):
            raise ConfigError(f"checkpoint.load: {error}") from None
        raise  # the store did not answer: the configuration may be right
    require_finite_weights(model, mesh, weights, optimizer)


def build_run_trainer(opened: OpenedRun, reporter: Reporter) -> Trainer:
    """The trainer of a run. Parameters and memory of a user's own model are counted now, for the reporter."""
    mesh = opened.mesh
    trainer = build_trainer(
        opened.config,
        mesh,
        opened.data,
        reporter=reporter,
        progress=opened.progress,
        weights=opened.weights,
        layout=opened.layout,
        sets=opened.sets,
    )
    if opened.config.optimizer.no_decay and not trainer.progress.step:
        _require_matches(opened.config.optimizer.no_decay, trainer.model, mesh)
    if reporter.parameters is not None:
        return trainer
    # What stays from step to step; the need of a micro-batch is not known.
    optimizer = trainer.optimizer
    states = state_bytes(optimizer, opened.config.optimizer.spec, all_masters=False)
    memory = kept_bytes(trainer.model, optimizer, states)
    reporter.parameters = sum(collectives.all_gather_objects(_count_parameters(trainer.model), mesh.pp))
    reporter.memory = memory
    with raised_on_every_rank(mesh.world):
        if mesh.world.rank == 0:
            # A checkpoint has each parameter, and for each the bytes that the optimizer keeps for it.
            size = next(trainer.model.parameters()).itemsize + memory["optimizer"] // max(memory["parameters"], 1)
            opened.folder.require_room(opened.config.checkpoint, reporter.parameters * size)
    return trainer


def _count_parameters(model: nn.Module) -> int:
    """Elements of the whole model's canonical tensors, each counted once."""
    shapes = {piece.name: piece.shape for _, _, placement in placements(model) for piece in placement.pieces}
    return sum(math.prod(shape) for shape in shapes.values())


def build_checkpoints(
    opened: OpenedRun, trainer: Trainer, reporter: Reporter, resumed: Resumed | None, copies: MemoryCopies | None
) -> CheckpointSaver:
    """The checkpoints of a run. Collective over the mesh."""
    config = opened.config
    mesh = opened.mesh
    settings = config.checkpoint
    state_hashes = None
    if config.log.state_hash_every:
        from shardwise.train.state_hashes import StateHashes

        state_hashes = StateHashes(trainer, reporter)
    saver = Saver(
        opened.folder.checkpoints.root,
        trainer.model,
        trainer.optimizer,
        config,
        mesh,
        mesh.host_group("checkpoint"),
        described={**_described(opened), "versions": package_versions()},
        tokenizer=opened.data.tokenizer_path,
        companions=opened.companions,
        base_model=opened.base_model,
        buffer_bytes=None if settings.buffer_mib is None else int(settings.buffer_mib * 2**20),
        keeping=KeptCheckpoints(settings.keep, settings.keep_every),
        find_root=None if opened.followed is None else opened.followed.follow,
    )
    return CheckpointSaver(
        trainer,
        saver,
        reporter,
        reason_to_stop=make_stop_check(opened.folder.directory.path),
        went_back=recorded_return(config, None if resumed is None else resumed.manifest),
        copies=copies,
        followed=opened.followed,
        state_hashes=state_hashes,
    )


def build_memory_copies(opened: OpenedRun, trainer: Trainer) -> MemoryCopies | None:
    """The copies of the state in memory; None where the configuration has none. Collective over the mesh."""
    if not memory_copy_interval(opened.config.checkpoint):
        return None
    from shardwise.train.memory_copies import MemoryCopies

    folder = opened.folder
    return MemoryCopies(f"{folder.id}-{folder.key}", _described(opened), trainer, began=folder.began)


def _described(opened: OpenedRun) -> dict[str, Any]:
    config = opened.config
    layout: dict[str, Any] = {**opened.layout.recorded(), "zero": config.optimizer.zero}
    if opened.layout.pipeline == 1:
        del layout["virtual"]
    else:
        blocks = [len(stage.layers) for stage in stage_plan(config, opened.layout)]
        layout |= {"schedule": config.parallel.schedule, "blocks": blocks}
    data: dict[str, Any] = {
        "fingerprint": opened.data.fingerprint,
        "summary": opened.data.summary,
        "run": opened.folder.id,
    }
    if sources := opened.data.source_fingerprints:
        data["sources"] = sources
    return {"layout": layout, "data": data}


def _build_pipeline(
    config: Config, layout: Layout, mesh: Mesh, model: nn.Module, dtype: torch.dtype
) -> Pipeline | None:
    if not isinstance(model, Stages):
        return None
    from shardwise.pipeline.schedule import Pipeline  # here, as it imports torch's compiler, which is slow

    train = config.train
    # A schedule sends between stages before the first output tells its shape. Sequence parallelism cuts the length.
    length = train.sequence_length // layout.sequence_parts
    x = torch.empty(length, train.micro_batch, model.hidden_size, dtype=dtype, device="meta")
    return Pipeline(model, config.parallel, mesh, layout.accumulation(train), x, losses=len(config.model.objectives))


def _choose_accumulation(config: Config, precision: Precision, model: nn.Module, device: torch.device) -> None:
    """Choose what adds the gradients of weights to those of earlier micro-batches: products, or autograd."""
    if not config.model.is_own and precision.gradient != precision.parameter:
        add_without_cast(weights_of(model))
    if model_adds_products(config, device):
        adds_in_graphs = model_adds_products_in_graphs(config, device)
        in_place = adds_in_graphs if config.compile.enabled else not config.splits_backward
        heads = [module.weight for module in model.modules() if isinstance(module, ParallelLMHead)]
        let_products_add([*weights_of(model), *heads], in_place=in_place)


def build_optimizer(config: Config, precision: Precision, model: nn.Module, mesh: Mesh) -> ZeroRedundancyOptimizer:
    """The optimizer of a trainer, over data parallelism."""
    settings = config.optimizer
    optimizer_class, options = _optimizer_class(config.hooks, settings, mesh)
    optimizer = ZeroRedundancyOptimizer(
        _parameter_groups(model, settings),
        optimizer_class,
        mesh=mesh,
        stage=settings.zero,
        model=model,
        replicate=config.parallel.replicate,
        reduce=config.reduce,
        gather=config.gather,
        prefetch=settings.prefetch,
        offload=settings.offload,
        average=False,  # the loss is already divided by the targets of the global batch
        max_norm=settings.max_norm,
        bucket_mib=settings.bucket_mib,
        optimizer_dtype=_torch_dtype(precision.optimizer),
        gradient_dtype=_torch_dtype(precision.gradient),
        reduce_dtype=_torch_dtype(precision.reduce),
        rounding=precision.rounding,
        state_dtype=_torch_dtype(precision.moments),
        rounding_seed=config.train.seed,
        **options,
    )
    # A forward pass of the user's own may change parameters through `.data`; no family of ours does.
    optimizer.compares_values = config.model.is_own
    add_step_hooks(model, optimizer, config.model, config.optimizer, mesh)
    return optimizer


def _optimizer_class(
    hooks: HooksConfig, settings: OptimizerConfig, mesh: Mesh
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if hooks.optimizer is not None:
        return user_optimizer(hooks, settings)
    spec = settings.spec
    options = {key.rpartition(".")[2]: attrgetter(key)(settings) for key in spec.keys}
    # One fused kernel reads and writes each element once, where a kernel for each operation would do so many times.
    if spec.has_fused_kernel:
        options["fused"] = devices.has_fused_adamw(torch.device("cpu") if settings.offload else mesh.device)
    return spec.load_class(), options


def _require_matches(no_decay: Sequence[str], model: nn.Module, mesh: Mesh) -> None:
    names = [piece.name for parameter in model.parameters() for piece in of_or_whole(parameter).pieces]
    matches = collectives.reduce_numbers([bool(any_like(names, name)) for name in no_decay], mesh.world)
    for pattern in [name for name, is_found in zip(no_decay, matches, strict=True) if not is_found]:
        raise ConfigError(
            f"optimizer.no_decay ({listing(no_decay)}) must match names of weights, and {pattern} matches none; the "
            f"nearest is {nearest_name(pattern, names, cutoff=0)}"
        )


def _parameter_groups(model: nn.Module, settings: OptimizerConfig) -> list[dict[str, object]]:
    """Parameter groups: with Muon, its matrices have a group of their own, and all others AdamW's learning rate."""
    if not settings.spec.orthogonalizes:
        return _decay_groups(model.parameters(), settings.weight_decay, settings.no_decay)
    from shardwise.optim.muon import block_matrices

    matrices = block_matrices(model)
    if not matrices:
        raise ConfigError(
            f"optimizer.name ({settings.name}) must have matrices to orthogonalize, and the model has none in its "
            "blocks, the entries of a torch.nn.ModuleList: put the blocks into one, or set optimizer.name=adamw"
        )
    other_parameters = [parameter for parameter in model.parameters() if parameter not in set(matrices)]
    lr_factor = (settings.muon.adamw_lr or settings.lr) / settings.lr
    adamw = {"use_muon": False, "lr": lr_factor * settings.lr, "lr_factor": lr_factor}
    return [
        {"params": matrices, "weight_decay": settings.weight_decay, "use_muon": True},
        *(group | adamw for group in _decay_groups(other_parameters, settings.weight_decay, settings.no_decay)),
    ]


def _decay_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float, no_decay: Sequence[str] | None = None
) -> list[dict[str, object]]:
    """Parameter groups: what decays, and what does not: names that match `no_decay`, without it vectors.

    Vectors are biases and norms, by their canonical shape.

    Raises:
        ConfigError: a pattern matches some of the tensors that one parameter holds, such as Q alone of Q, K and V.
    """
    decaying: list[nn.Parameter] = []
    without_decay: list[nn.Parameter] = []
    for parameter in parameters:
        pieces = of_or_whole(parameter).pieces
        decays = len(pieces[0].shape) > 1
        if no_decay is not None:
            named = [piece.name for piece in pieces if any(fnmatchcase(piece.name, name) for name in no_decay)]
            decays = not named
            if named and len(named) < len(pieces):
                raise ConfigError(
                    f"optimizer.no_decay ({listing(no_decay)}) must match all or none of "
                    f"{listing([piece.name for piece in pieces])}, which are one parameter: it matches {listing(named)}"
                )
        (decaying if decays else without_decay).append(parameter)
    groups: list[dict[str, object]] = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
