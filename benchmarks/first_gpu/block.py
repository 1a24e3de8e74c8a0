"""How long does one block take, forward and backward, eager and compiled, and does the device wait for the host?"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from first_gpu.session import Figures, Session, weights_drawn_on_device
from first_gpu.timing import host_ms, tflops, timed
from first_gpu.training import Setting
from shardwise.config import Config
from shardwise.data.formats.prepared_data import make_batches
from shardwise.distributed.mesh import Mesh
from shardwise.layers.linear import weights_of
from shardwise.layers.matmul import adds_products, let_products_add
from shardwise.models.blocks import ModelPart
from shardwise.models.build import build_model
from shardwise.train.compile.compiled_units import Compilation
from shardwise.train.mean_loss import MicroBatch

TITLE = "One block, forward and backward"
NOTE = (
    "One block of Llama 2 7B in bfloat16, whose weight gradients are added to float32 buffers. Host: the time in which "
    "the host starts all kernels on an idle device; the block is launch-bound where it is near the whole time. TFLOP/s "
    "of the model's work, the causal half of attention counted, recompute not."
)
COLUMNS = "program recompute micro_batch ms host_ms host_share tflops peak_allocated"


def run(session: Session) -> None:
    settings = itertools.product(("none", "selective", "full"), (1, 2), (False, True))
    for recompute, micro_batch, is_compiled in session.few(list(settings)):
        setting = Setting(is_compiled, recompute, micro_batch)
        session.measure(setting.labels, lambda setting=setting: _block(session, setting))


def _block(session: Session, setting: Setting) -> Figures:
    return figures_of(session, setting.config(session, 1, blocks=1), Mesh(device=session.device))


def figures_of(session: Session, config: Config, mesh: Mesh) -> Figures:
    """Times of one block of a configuration, on this rank of a mesh."""
    call = _make(session, config, mesh)
    found = timed(session, [call], seconds=2 * session.sizes.seconds)
    host = host_ms(session, call)
    sizes = session.sizes
    tokens = config.train.micro_batch * sizes.sequence
    weights = 4 * sizes.hidden**2 + 3 * sizes.hidden * sizes.mlp
    flops = 6 * tokens * (weights + sizes.sequence * sizes.hidden) / mesh.tp.size
    return {**found, "host_ms": host, "host_share": host / found["ms"], "tflops": tflops(flops, found["ms"])}


def _make(session: Session, config: Config, mesh: Mesh) -> Callable[[], None]:
    """A function that runs a block forward and backward."""
    part = ModelPart(range(1), is_first=False, is_last=False)
    is_cut = config.parallel.sequence and mesh.tp.size > 1
    compiler = None
    if config.compile.enabled:
        torch.compiler.reset()
        compiler = Compilation(config.compile, session.device, config.model, [mesh.tp])
    with weights_drawn_on_device():
        model = build_model(
            config,
            mesh.tp,
            sequence_parallel=is_cut,
            device=session.device,
            dtype=torch.bfloat16,
            part=part,
            compiler=compiler,
        )
    if adds_products(session.device):
        let_products_add(weights_of(model))
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    batches = make_batches(config, session.text, "train")
    assert batches is not None, "it has samples"
    batch = MicroBatch.on(session.device, batches.blank(config.train.micro_batch))
    key = batch.dropout_key(config.train, step=1)
    rows = session.sizes.sequence // (mesh.tp.size if is_cut else 1)
    x = session.random(rows, config.train.micro_batch, session.sizes.hidden).requires_grad_()
    dy = torch.randn_like(x)

    def call() -> None:
        x.grad = None
        batch.call_of(model, x, key)().backward(dy)

    return call
