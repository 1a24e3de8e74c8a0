"""Draw docs/images/concept-*.svg, the pictures of docs/concepts.md, from what the code itself records and computes.

    python -m scripts.concept_pictures

Placement records come from layers that are built as each of four ranks builds them, memory and traffic from
`shardwise.estimates`, a pipeline's order from its simulation, and the pieces of a checkpoint from the manifest of a
training of four ranks. A test draws all of them but the last again and compares.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

import torch
import torch.distributed as dist

from scripts.tutorial_common import BLUE, GREEN, IMAGES, INK, ORANGE, VERMILION
from shardwise import ColumnParallelLinear, Mesh, RMSNorm, RowParallelLinear, ZeroRedundancyOptimizer
from shardwise.base.tensor_box import Box
from shardwise.checkpoint.format.manifest import MANIFEST, Manifest
from shardwise.config import Config, ParallelConfig, Schedule, check_layout, load_config
from shardwise.distributed.placement import placements
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.estimates.memory import expected_memory
from shardwise.pipeline.timeline import simulate

PURPLE = "#aa4499"
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, "#56b4e9", INK)
WIDTH = 760
GIB = 2**30


class Picture:
    """An SVG that is readable on a light and on a dark ground: grey text, and boxes in half-transparent colours."""

    def __init__(self, description: str) -> None:
        self.description, self.height = description, 0.0
        self._parts: list[str] = []

    def box(self, at: tuple[float, float], size: tuple[float, float], color: str, text: str = "") -> None:
        """A box with its text in the middle."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}" fill-opacity="0.3" '
            f'stroke="{color}"/>'
        )
        self.height = max(self.height, y + height + 2)
        if text:
            self.text((x + width / 2, y + height / 2 + 4), text, anchor="middle")

    def text(self, at: tuple[float, float], text: str, *, anchor: str = "start", bold: bool = False) -> None:
        """Text whose base line begins, ends or has its middle at a point."""
        weight = ' font-weight="bold"' if bold else ""
        x, y = at
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')
        self.height = max(self.height, y + 6)

    def __str__(self) -> str:
        size = f'width="{WIDTH}" height="{self.height:g}" viewBox="0 0 {WIDTH} {self.height:g}"'
        font = f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">'
        return "\n".join((head, f"<title>{escape(self.description)}</title>", *self._parts, "</svg>", ""))


# ---- the placement record


class FeedForward(torch.nn.Module):
    """A norm, a matmul that is cut by rows of its weight, and one that is cut by columns."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.norm = RMSNorm(32, name="norm", seed=1, group=mesh.tp, sequence_parallel_enabled=True)
        self.up = ColumnParallelLinear(
            32, 64, gather_output=False, bias=False, name="up", seed=1, group=mesh.tp, sequence_parallel_enabled=True
        )
        self.down = RowParallelLinear(
            64,
            32,
            input_is_parallel=True,
            bias=False,
            name="down",
            seed=1,
            group=mesh.tp,
            sequence_parallel_enabled=True,
        )


def records() -> Iterator[tuple[Mesh, FeedForward, ZeroRedundancyOptimizer]]:
    """The layers and their optimizer as each rank of TP 2, DP 2 has them; no rank sends anything."""
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4)
        try:
            mesh = Mesh(tensor=2)
            model = FeedForward(mesh)
            yield mesh, model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, mesh=mesh)
        finally:
            dist.destroy_process_group()


def placement_picture() -> Picture:
    """Canonical tensors cut over the tensor-parallel ranks; below, the flat bucket cut over the data-parallel ranks."""
    picture = Picture(
        "The weights of three layers cut over two tensor-parallel ranks, and a bucket over two data ranks"
    )
    held: dict[tuple[str, Box], list[int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    rows: list[tuple[str, list[tuple[str, int]], slice, int]] = []
    for mesh, model, optimizer in records():
        for _, _, placement in placements(model):
            for piece in placement.pieces:
                shapes[piece.name] = piece.shape
                held.setdefault((piece.name, piece.box), []).append(mesh.tp.rank)
        (bucket,) = optimizer.buckets
        by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        parts = [(by_id[id(parameter)], parameter.numel()) for parameter in bucket.parameters]
        rows.append((f"TP rank {mesh.tp.rank}, DP rank {mesh.dp.rank}", parts, bucket.owned, bucket.numel))
    picture.text((0, 14), "The model's tensors, and which tensor-parallel rank holds which box of them", bold=True)
    x = 0.0
    for name, shape in shapes.items():
        wide = shape[1] if len(shape) == 2 else 8
        picture.text((x, 38), f"{name} {list(shape)}")
        for (tensor, box), ranks in held.items():
            if tensor == name:
                start, size = (box.start, box.size) if len(shape) == 2 else ((box.start[0], 0), (box.size[0], 8))
                both = set(ranks) == {0, 1}
                label = "both" if both else f"TP {ranks[0]}"
                at, extent = (x + 3.5 * start[1], 46 + 2.5 * start[0]), (3.5 * size[1], 2.5 * size[0])
                picture.box(at, extent, INK if both else COLORS[ranks[0]], label)
        x += max(3.5 * wide, 150) + 40
    picture.text(
        (0, 236), "Each rank's optimizer: its parameters in one flat bucket, of which it updates one part", bold=True
    )
    for number, (who, parts, owned, length) in enumerate(rows):
        y, scale = 246 + 34 * number, 560 / length
        picture.text((0, y + 17), who)
        at = 160.0
        for name, count in parts:
            picture.box((at, y), (count * scale, 26), INK, f"{name} ({count})" if count > 100 else "")
            at += count * scale
        picture.box(
            (160 + owned.start * scale, y), ((owned.stop - owned.start) * scale, 26), COLORS[2 + (owned.start > 0)]
        )
    return picture


# ---- memory and traffic


LAYOUTS: dict[str, tuple[str, ...]] = {
    "DP 8": ("optimizer.zero=0",),
    "DP 8, ZeRO-1": ("optimizer.zero=1",),
    "TP 8": ("parallel.tensor=8", "parallel.sequence=false"),
    "TP 8, SP": ("parallel.tensor=8", "parallel.sequence=true"),
    "PP 8": ("parallel.pipeline=8", "parallel.tensor=1", "parallel.sequence=false"),
}


def configured(changes: Sequence[str]) -> Config:
    base = ["data.dataset=tiny", "parallel.tensor=1", "parallel.sequence=false", "train.recompute=none", *changes]
    return load_config("llama2-7b", base)


def memory_picture() -> Picture:
    """Memory of a rank by kind, and what it sends in a step, for the same model and batch on eight devices."""
    picture = Picture("Llama 2 7B on eight devices: memory of a rank by kind, and bytes that it sends in a step")
    cases = {name: (configured(changes), check_layout(configured(changes), 8)) for name, changes in LAYOUTS.items()}
    estimates = {name: expected_memory(config, layout, True) for name, (config, layout) in cases.items()}
    most = max(estimate.total for estimate in estimates.values() if estimate)
    picture.text(
        (0, 14), "Llama 2 7B on 8 devices: GiB of memory on the rank that needs most, and GiB sent in a step", bold=True
    )
    kinds: list[str] = []
    for number, (name, (config, layout)) in enumerate(cases.items()):
        estimate, y = estimates[name], 52 + 52 * number
        assert estimate is not None, "the sizes of a shipped family are known"
        picture.text((0, y + 15), name)
        at = 100.0
        for kind, size in estimate.rows():
            kinds.append(kind) if kind not in kinds else None
            width = size / most * 600
            if width >= 1:
                label = f"{size / GIB:.1f}" if width > 26 else ""
                picture.box((at, y), (width, 22), COLORS[kinds.index(kind)], label)
            at += width
        picture.text((at + 6, y + 15), f"{estimate.total / GIB:.1f}")
        sent = wire_bytes(step_transfers(config, layout, True)) or {}
        by_axis: dict[str, float] = {}
        for (axis, kind), size in sent.items():
            by_axis[f"{kind.replace('_', '-')} over {axis}"] = (
                by_axis.get(f"{kind.replace('_', '-')} over {axis}", 0) + size
            )
        told = ", ".join(
            f"{size / GIB:,.{0 if size >= 100 * GIB else 1}f} {what}"
            for what, size in by_axis.items()
            if size >= 0.05 * GIB
        )
        picture.text((100, y + 38), f"sent: {told}")
    x = 100.0
    for number, kind in enumerate(kinds):
        picture.box((x, 26), (12, 12), COLORS[number])
        picture.text((x + 17, 36), kind)
        x += 30 + 6.6 * len(kind)
    return picture


# ---- a pipeline's order


SCHEDULES: tuple[tuple[Schedule, str], ...] = (
    ("gpipe", "gpipe: all forward passes, then all backward passes"),
    ("1f1b", "1f1b: each backward pass as soon as possible, to hold fewer activations"),
    ("zbv", "zbv: two stages on each rank, and gradients of weights in the gaps"),
)
PASSES = {
    "forward": (BLUE, "forward"),
    "backward": (ORANGE, "backward"),
    "input": (GREEN, "input's gradient"),
    "weight": (PURPLE, "weights' gradients"),
}


def pipeline_picture() -> Picture:
    """What each of four pipeline ranks does in a step of eight micro-batches."""
    picture = Picture(
        "The order of passes on four pipeline ranks in a step of eight micro-batches, for three schedules"
    )
    x = 0.0
    for color, name in (*PASSES.values(), (COLORS[5], "forward of the second stage")):
        picture.box((x, 2), (12, 12), color)
        picture.text((x + 17, 12), name)
        x += 34 + 6.3 * len(name)
    y = 40.0
    for schedule, words in SCHEDULES:
        stages = 2 if schedule == "zbv" else 1
        simulation = simulate(ParallelConfig(pipeline=4, schedule=schedule), 8)
        picture.text((0, y), f"{words} ({simulation.bubble:.0%} of the time a rank waits)", bold=True)
        scale = 690 / simulation.makespan
        for rank, row in enumerate(simulation.ranks):
            picture.text((0, y + 25 + 22 * rank), f"PP rank {rank}")
            for timed in row:
                color, _ = PASSES[timed.action.kind]
                if stages == 2 and timed.action.stage >= 4 and timed.action.kind == "forward":
                    color = COLORS[5]
                at = (65 + timed.start * scale, y + 11 + 22 * rank)
                picture.box(at, ((timed.end - timed.start) * scale, 20), color, str(timed.action.micro_batch))
        y += 130
    return picture


# ---- a checkpoint


def trained() -> Manifest:
    """The manifest of a tiny Llama's checkpoint by TP 2, DP 2 with ZeRO-1."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "shardwise",
            "train",
            "llama2-tiny",
            "--nproc",
            "4",
            "--run-dir",
            f"{folder}/run",
        ]
        layout = ["parallel.tensor=2", "optimizer.zero=1", "train.steps=3"]
        subprocess.run([*command, *layout], check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).glob(f"run/checkpoints/step-*/{MANIFEST}")
        return Manifest.from_json(path.read_text(encoding="utf-8"), str(path))


def checkpoint_picture(manifest: Manifest) -> Picture:
    """Which file holds which box of a tensor's weights, and of its optimizer state."""
    picture = Picture(
        "Files of a checkpoint, and which of them hold the pieces of one tensor and of its optimizer state"
    )
    files = [file.path for file in manifest.files]
    weights = [number for number, path in enumerate(files) if path.endswith(".safetensors")]
    color = {number: COLORS[place] for place, number in enumerate(weights)}
    picture.text((0, 14), "Files", bold=True)
    for place, number in enumerate(weights):
        picture.box((0, 24 + 24 * place), (12, 12), color[number])
        picture.text((18, 34 + 24 * place), f"{files[number]}, {manifest.files[number].bytes:,} bytes")
    others = [file for number, file in enumerate(files) if number not in weights]
    picture.text((0, 34 + 24 * len(weights)), f"{MANIFEST}, {', '.join(others)}")
    moments = manifest.tensors["exp_avg"]
    name = max(moments, key=lambda name: (len(moments[name].pieces), _squareness(moments[name].shape)))
    shape = manifest.tensors["model"][name].shape
    y = 84 + 24 * len(weights)
    picture.text((0, y - 14), f"{name} {list(shape)}: which file holds which box", bold=True)
    scale = min(210 / shape[1], 150 / shape[0])
    for column, (state, words) in enumerate(
        {"model": "weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}.items()
    ):
        x = 250.0 * column
        picture.text((x, y + 6), words)
        for piece in manifest.tensors[state][name].pieces:
            (row, start), (tall, wide) = piece.box.start, piece.box.size
            at, size = (x + start * scale, y + 14 + row * scale), (wide * scale, tall * scale)
            picture.box(
                at,
                size,
                color[piece.file],
                Path(files[piece.file]).stem if tall * scale > 16 and wide * scale > 70 else "",
            )
    return picture


def _squareness(shape: Sequence[int]) -> float:
    """1 for a square, less for a longer rectangle, 0 for a vector."""
    return min(shape) / max(shape) if len(shape) == 2 else 0.0


def drawn() -> Mapping[str, Picture]:
    """The pictures that need no training, by name."""
    return {"placement": placement_picture(), "memory": memory_picture(), "pipeline": pipeline_picture()}


def main() -> None:
    for name, picture in {**drawn(), "checkpoint": checkpoint_picture(trained())}.items():
        (IMAGES / f"concept-{name}.svg").write_text(str(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
