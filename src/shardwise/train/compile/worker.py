"""Captures and compiles one graph: `python -m shardwise.train.compile.worker` reads a job from its standard input.

A job is an object of JSON: the resolved `config`, `unit` and whether it is in `training` choose the graph; `rank`, one
that has the unit, and `world` are of a job with one data-parallel rank; then the kind of `device`, and `only_capture`,
which compiles nothing. The compiler's folder is the environment's.

The process plays one rank of the training under torch's fake process group, whose collectives return at once: the unit
of the model alone, with weights and one micro-batch of the training's shapes, forward and backward.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from shardwise.base.errors import ConfigError, RunError
from shardwise.config import Config, FamilyConfig, Layout, check_layout, config_from_sections
from shardwise.data import make_batches, random_tokens
from shardwise.distributed import devices
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.torch_private import fake_process_group, fake_tensors
from shardwise.launch.rank_process import die_with_parent
from shardwise.layers.linear import weights_of
from shardwise.layers.matmul import add_without_cast, let_products_add
from shardwise.layers.units import WeightScales
from shardwise.models.blocks import ModelPart
from shardwise.models.build import build_model, model_adds_products_in_graphs
from shardwise.train.compile.compiled_units import HEAD, Compilation, compiled_unit_of_block
from shardwise.train.compile.run_graphs import FOLDER_VARIABLE
from shardwise.train.mean_loss import MicroBatch

CAPTURING = "aot_eager"
"""A backend that captures forward and backward graphs and compiles nothing."""


def main() -> None:
    die_with_parent()
    job = json.load(sys.stdin)
    config = config_from_sections(job["config"])
    unit: str = job["unit"]
    device = torch.device("cpu" if job["device"] == "cpu" else f"{job['device']}:0")
    if job["world"] > 1:
        fake_process_group(job["rank"], job["world"])
    layout = check_layout(config, job["world"])
    compilation = _capture_graph(
        config, layout, device, unit, training=job["training"], only_capture=job["only_capture"]
    )
    if not compilation.graphs:
        raise RunError(f"{unit} was not called: a forward pass of the model must call each of its blocks")


def _capture_graph(
    config: Config, layout: Layout, device: torch.device, unit: str, *, training: bool, only_capture: bool
) -> Compilation:
    """Run one unit of the model on a micro-batch, so that its graph is captured; its name and mode choose the graph."""
    if config.is_bit_equal and device.type != "cpu":
        devices.add_in_one_order(device, config.train.threads)
    mesh = Mesh(**config.parallel.degrees, device=device, grains=config.grains)
    # On CPU the ranks that will run the graph use gloo, where a group scatters by an all-to-all (`Group`).
    for group in (mesh.tp, mesh.cp):
        group.scatter_by_all_to_all = device.type == "cpu" or group.adds_in_tree
    dtype: torch.dtype = getattr(torch, config.precision.resolved(device.type != "cpu").parameter)
    part = None if config.model.is_own else _part(config.known_shapes, unit)
    settings = config.compile
    batch = _batch(config, torch.device("cpu") if only_capture else device).part(mesh.cp)
    adds = training and model_adds_products_in_graphs(config, device)
    with fake_tensors() if only_capture else nullcontext():
        if only_capture:
            settings = settings.model_copy(update={"backend": CAPTURING, "options": {}})
            batch = batch.empty_on(device)
        compilation = Compilation(settings, device, config.model, [mesh.tp, mesh.cp], only=unit)
        compilation.folder = Path(os.environ[FOLDER_VARIABLE]) if FOLDER_VARIABLE in os.environ else None
        model = build_model(
            config,
            mesh.tp,
            sequence_parallel=layout.sequence_parallel,
            mesh=mesh,
            device=device,
            dtype=dtype,
            part=part,
            compiler=compilation,
        )
        if adds:
            # Gradients that the graph takes as inputs, as the optimizer of a training gives them to its weights.
            weights = weights_of(model)
            let_products_add(weights)
            add_without_cast(weights)
            for weight in weights:
                weight.grad = torch.zeros_like(weight, dtype=torch.float32)
        x = None
        if part is not None:
            rows = config.train.sequence_length // layout.sequence_parts
            shape = rows, config.train.micro_batch, config.known_shapes.hidden_size
            x = torch.zeros(shape, device=device, dtype=dtype, requires_grad=training)
        key = batch.dropout_key(config.train, step=1) if training else None
        model.train(training)
        with torch.set_grad_enabled(training), WeightScales(model).kept():
            out: Tensor = batch.call_of(model, x, key)()
        # The graph of the backward pass is captured with the forward pass, and compiled when it runs.
        if training and not only_capture:
            out.sum().backward()
    return compilation


def _part(model: FamilyConfig, unit: str) -> ModelPart:
    """The least part of a family's model that has the unit; its input is that of a later pipeline stage."""
    if unit == HEAD:
        return ModelPart(range(0), is_first=False, is_last=True)
    layer = next(layer for layer in range(model.num_hidden_layers) if compiled_unit_of_block(model, layer) == unit)
    return ModelPart(range(layer, layer + 1), is_first=False, is_last=False)


def _batch(config: Config, device: torch.device) -> MicroBatch:
    """A micro-batch with arrays as in the training, which counts nothing."""
    train = config.train
    if config.data.document_options and config.data.eod_token is None:
        config = config.with_keys(data={"eod_token": 0})
    pairs = "nsp" in config.model.objectives
    text = random_tokens(config.model.vocab_size, train.micro_batch + 4, train.sequence_length, pairs=pairs)
    batches = make_batches(config, text, "train")
    assert batches is not None, "it has samples"
    return MicroBatch.on(device, batches.blank(train.micro_batch))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
