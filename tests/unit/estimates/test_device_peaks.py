"""Peaks by the names that drivers report; a name with an unknown word has none."""

import pytest

from shardwise.estimates.device_peaks import peak_flops
from shardwise_plan.device_specs import load_device


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA B300 SXM6 AC", 2250, 75),
        ("NVIDIA GB200", 2500, 80),
        ("NVIDIA H100 80GB HBM3", 989.5, 67),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA L4", 121, 30.3),
        ("Tesla T4", None, 8.1),
        ("Tesla V100-SXM2-16GB", None, 15.7),
        ("NVIDIA RTX A6000", 154.85, 38.7),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 500, 125),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("AMD Instinct MI300X", 1307.4, 163.4),
        ("trn1", 95, 23.75),
        ("trn2", 166.75, 45.25),
        ("trn3", 167.75, 45.75),
    ],
)
def test_published_peaks(name: str, bfloat16: float | None, float32: float) -> None:
    assert peak_flops(name, "bfloat16") == (None if bfloat16 is None else pytest.approx(bfloat16 * 1e12))
    assert peak_flops(name, "float32") == pytest.approx(float32 * 1e12)


UNKNOWN = [
    "cpu", "", "NVIDIA H1000", "NVIDIA H200 PCIe", "NVIDIA A10-4Q", "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD Instinct",
]  # fmt: skip


def test_an_unknown_peak_is_none_and_a_core_of_trainium2_has_half_of_a_logical_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in UNKNOWN:
        assert peak_flops(name, "bfloat16") is None
    assert peak_flops("trn2", "bfloat16") == load_device("trn2").bfloat16
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert peak_flops("trn2", "bfloat16") == load_device("trn2").bfloat16 / 2
    assert peak_flops("trn1", "bfloat16") == load_device("trn1").bfloat16, "its cores are not joined"


@pytest.mark.parametrize(
    ("key", "reported"),
    [
        *[(key, f"NVIDIA {key.upper()}") for key in ("gb300", "gb200", "b200", "h200")],
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB"),
        ("mi300x", "AMD Instinct MI300X"),
        *[(key, key) for key in ("trn1", "trn2", "trn3")],
    ],
)
def test_plans_and_trainings_divide_by_the_same_peak(key: str, reported: str) -> None:
    device = load_device(key)
    assert [peak_flops(reported, "bfloat16"), peak_flops(reported, "float32")] == [device.bfloat16, device.float32]
