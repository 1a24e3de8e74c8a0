"""Peak speeds of devices by the names that their drivers report: the denominator of MFU; and the shipped device files.

`shardwise_plan` reads the whole files, of which the peaks here are two figures.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardwise.config import DtypeName, parse_yaml

DEVICE_FILES = Path(__file__).parent / "devices"
"""Folder of a YAML file for each device, whose figures are `{value: NUMBER, source: TEXT}`."""

# Peak dense TFLOP/s in bfloat16 and float32 of a device, by the words of its name; or the device file that has them.
# Sparse figures of the data sheets are halved. float32 is the non-tensor-core rate: torch multiplies float32 matrices
# at full precision ("highest") unless told otherwise, so TF32 would be the wrong denominator. None: the device has no
# such units (V100 and T4 emulate bfloat16).
_PEAKS: dict[str, str | tuple[float | None, float]] = {
    "GB300": "gb300",
    "B300": (2250.0, 75.0),  # NVIDIA HGX B300 data sheet, divided by 8 (bfloat16 without sparsity)
    "B300 SXM6 AC": (2250.0, 75.0),
    "GB200": "gb200",
    "B200": "b200",
    "GH200": (989.5, 67.0),  # NVIDIA GH200 Grace Hopper Superchip data sheet
    "H200": "h200",
    "H200 NVL": (835.5, 60.0),  # NVIDIA H200 Tensor Core GPU data sheet, NVL column
    "H100": "h100",
    "H100 PCIE": (756.5, 51.2),  # NVIDIA H100 Tensor Core GPU data sheet, PCIe column
    "H100 NVL": (835.5, 60.0),  # NVIDIA H100 Tensor Core GPU data sheet, NVL column
    "H800": "h100",  # only FP64 and NVLink differ
    "H800 PCIE": (756.5, 51.2),  # as H100 PCIe: only FP64 and NVLink differ
    "H20": (148.0, 44.0),  # Tom's Hardware and torchtitan 0.3.0; NVIDIA publishes no data sheet
    "H20 3E": (148.0, 44.0),  # as H20: only the memory differs
    "A100 SXM4": "a100-80gb",
    "A100 PCIE": "a100-80gb",  # NVIDIA A100 80GB data sheet: SXM and PCIe alike
    "A800 SXM4": "a100-80gb",  # only NVLink differs
    "A800 PCIE": "a100-80gb",
    "A40": (149.7, 37.4),  # NVIDIA A40 data sheet
    "A30": (165.0, 10.3),  # NVIDIA A30 data sheet
    "A10": (125.0, 31.2),  # NVIDIA A10 data sheet
    "A10G": (70.0, 35.0),  # NVIDIA A10G data sheet (Amazon EC2 G5)
    "L40S": (362.0, 91.6),  # NVIDIA L40S data sheet
    "L40": (181.0, 90.5),  # NVIDIA L40 data sheet
    "L4": (121.0, 30.3),  # NVIDIA L4 data sheet
    "T4": (None, 8.1),  # NVIDIA T4 data sheet
    "V100 PCIE": (None, 14.0),  # NVIDIA V100 data sheet, PCIe column
    "V100 SXM2": (None, 15.7),  # NVIDIA V100 data sheet, SXM2 column
    # NVIDIA data sheets of the workstation cards. Their tensor performance is with sparsity, in float16 for Ampere, in
    # fp8 for Ada and in FP4 for Blackwell.
    "RTX A6000": (309.7 / 2, 38.7),
    "RTX 6000 ADA GENERATION": (1457.0 / 4, 91.1),
    "RTX PRO 6000 BLACKWELL WORKSTATION EDITION": (4000.0 / 8, 125.0),
    # NVIDIA architecture whitepapers (GA102, Ada, RTX Blackwell): bfloat16 that adds in float32.
    "RTX 3090": (71.0, 35.6),
    "RTX 4090": (165.2, 82.6),
    "RTX 5090": (209.5, 104.8),
    "MI300X": "mi300x",
    "MI325X": "mi300x",  # AMD Instinct MI325X data sheet: only memory and power differ
    "MI350X": (2306.9, 144.2),  # AMD Instinct MI350X: 256 compute units at 2,200 MHz (data sheet: 2.3 PFLOP/s)
    "MI355X": (2516.6, 157.3),  # AMD Instinct MI355X: 256 compute units at 2,400 MHz (data sheet: 2.5 PFLOP/s)
    # Amazon's instances of one chip differ by their networks.
    **dict.fromkeys(("TRN1", "TRN1N"), "trn1"),
    **dict.fromkeys(("TRN2", "TRN2N", "TRN2U"), "trn2"),
    **dict.fromkeys(("TRN3", "TRN3U"), "trn3"),
}
_SAME_SPEED = re.compile(r"NVIDIA|TESLA|GEFORCE|AMD|INSTINCT|VF|\d+GB?|HBM3E?")
"""Words that say nothing about the speed: makers, a whole GPU in a virtual machine, sizes and kinds of memory."""


def peak_flops(device_name: str, dtype: DtypeName) -> float | None:
    """Peak dense FLOP/s of one rank's device for matrix products in `dtype`; None if it is unknown.

    All words of the name must be known. One more may be a slower device: a slice of a GPU (MIG or vGPU), a card for
    laptops, or another form such as PCIe.
    """
    words = re.findall(r"[A-Z0-9]+", device_name.upper())
    entry = _PEAKS.get(" ".join(word for word in words if not _SAME_SPEED.fullmatch(word)))
    if isinstance(entry, str):
        text = (DEVICE_FILES / f"{entry}.yaml").read_text(encoding="utf-8")
        figures = parse_yaml(text, entry)
        peak = float(figures[f"{dtype}_tflops"]["value"]) * 1e12
        # The files of trn2 and trn3 have a logical core of two physical ones, as the runtime makes them by default.
        cores = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2")
        return peak / 2 if entry in ("trn2", "trn3") and cores == "1" else peak
    tera = entry[dtype == "float32"] if entry else None
    return None if tera is None else tera * 1e12
