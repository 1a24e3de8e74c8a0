"""Is a block at TP 8 with sequence parallelism host-bound? Rank 0 of a job that is not there; nothing is sent."""

from __future__ import annotations

import itertools

import torch.distributed as dist

from first_gpu.block import figures_of
from first_gpu.session import Figures, Session
from first_gpu.training import Setting
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.torch_private import fake_process_group

TITLE = "One block on rank 0 of TP 8"
NOTE = (
    "With sequence parallelism, in torch's fake process group: its collectives send nothing, "
    "so a real job's host time is longer. Where the host takes longer than the kernels, the block is host-bound."
)
COLUMNS = "program recompute tensor micro_batch ms host_ms host_share tflops"


def run(session: Session) -> None:
    settings = list(itertools.product((8, 4, 2), (1, 2), (False, True)))
    for tensor, micro_batch, is_compiled in session.few(settings):
        setting = Setting(is_compiled, "none", micro_batch)
        labels = {**setting.labels, "tensor": tensor}
        session.measure(labels, lambda setting=setting, tensor=tensor: _block(session, setting, tensor))


def _block(session: Session, setting: Setting, tensor: int) -> Figures:
    keys = [f"parallel.tensor={tensor}", "parallel.sequence=true", f"train.micro_batch={setting.micro_batch}"]
    keys += [f"train.recompute={setting.recompute}", *session.compile_keys(setting.is_compiled)]
    config = session.config(*keys, blocks=1)
    fake_process_group(0, tensor)
    try:
        return figures_of(session, config, Mesh(tensor=tensor, device=session.device))
    finally:
        dist.destroy_process_group()
