"""Counting accelerators from device files, and published peaks by device name."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.base import hardware
from shardwise.base.errors import ConfigError
from tests.rows import rows_of

ROWS = rows_of(__file__)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for accelerators, and none of this machine's own restrictions."""
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cu130")
    for name in ("CUDA_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def devices(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


def test_devices_that_files_and_torch_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dev = devices(tmp_path, "nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "null")
    assert hardware.accelerators(dev) == ("nvidia", 3)
    for printed, counted in [("a note\nxpu 3\n", ("xpu", 3)), ("a note\n", ("cpu", 0))]:
        monkeypatch.setattr(
            "subprocess.run", lambda *_, printed=printed, **__: SimpleNamespace(returncode=0, stdout=printed)
        )
        assert hardware._counted_by_torch.__wrapped__() == counted
    for text, expected in [
        ("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n", "AMX"),
        ("flags\t\t: fpu avx2 avx512_bf16\n", "AVX512-BF16"),
        ("flags\t\t: fpu avx2 avx512f\n", ""),
        (None, None),
    ]:
        (tmp_path / "cpuinfo").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "cpuinfo").write_text(text)
        assert hardware.bfloat16_unit(tmp_path / "cpuinfo") == expected


@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("1,3", 2), ("0,7,1", 1), ("GPU-5a1b, GPU-77", 2), ("", 0)])
def test_visible_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    dev = devices(tmp_path, *(f"nvidia{n}" for n in range(4)))
    assert hardware.accelerators(dev) == ("nvidia" if count else "cpu", count)
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cpu")
    assert hardware.accelerators(dev) == ("cpu", 0), "a torch built for CPUs uses none"


@pytest.mark.parametrize(("cores", "variables", "expected"), ROWS["cores"])
def test_neuron_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int | None, variables: dict[str, str], expected: int
) -> None:
    for chip in range(2 if cores else 0):
        listed = tmp_path / f"sys/devices/virtual/neuron_device/neuron{chip}/core_count"
        listed.parent.mkdir(parents=True)
        listed.write_text(f"{cores}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hardware.accelerators(devices(tmp_path, "neuron0", "neuron1"), tmp_path / "sys") == ("neuron", expected)


@pytest.mark.parametrize(("name", "value", "says"), ROWS["wrong"])
def test_wrong_numbers_of_cores(
    name: str, value: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{says}"):
        hardware.accelerators(devices(tmp_path, "neuron0"), tmp_path / "sys")


@pytest.mark.parametrize(("build", "present", "plugin", "autoload", "asked"), ROWS["asked"])
def test_torch_is_asked_where_files_do_not_tell(
    build: str, present: str, plugin: bool, autoload: str, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: f"2.13.0{build}")
    packages = tmp_path / "packages"
    for name, points in (("other-1", "[console_scripts]"), ("device-2", "[torch.backends]\nstrict = strict:load")):
        folder = packages / f"{name}.dist-info"
        folder.mkdir(parents=True)
        if plugin or name == "other-1":
            (folder / "entry_points.txt").write_text(points)
    monkeypatch.setattr(hardware.sys, "path", [str(packages), str(tmp_path / "absent")])
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    monkeypatch.setattr(hardware, "_counted_by_torch", lambda: ("xpu", 3))
    monkeypatch.setattr(hardware.sys, "platform", "linux")
    assert hardware.accelerators(devices(tmp_path, present)) == (("xpu", 3) if asked else ("cpu", 0))


GIB = 2**30
V2 = {
    "memory.max": GIB,
    "memory.current": GIB // 2,
    "memory.stat": f"inactive_file {GIB // 8}\nactive_file {GIB // 8}\n",
}
V1 = {
    "memory.limit_in_bytes": GIB,
    "memory.usage_in_bytes": GIB // 2,
    "memory.stat": f"cache 5\ntotal_inactive_file {GIB // 8}\ntotal_active_file {GIB // 8}\n",
}


@pytest.mark.parametrize(
    ("membership", "group", "files", "available"),
    [
        ("", "", {}, 8 * GIB),
        ("0::/job/step", "job", V2, 3 * GIB // 4),
        ("4:memory:/job\n0::/", "memory/job", V1, 3 * GIB // 4),
        ("4:cpu,memory:/host/only", "memory", V1, 3 * GIB // 4),
        ("0::/", "", V2 | {"memory.current": 2 * GIB}, 0),
    ],
)
def test_fault_04_a_control_group_limits_the_memory(
    membership: str, group: str, files: dict[str, object], available: int, tmp_path: Path
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    for folder in (proc / "self", groups / group):
        folder.mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {8 * GIB // 1024} kB\n")
    (proc / "self/cgroup").write_text(membership)
    for name, content in files.items():
        (groups / group / name).write_text(f"{content}\n")
    assert hardware.available_memory(proc, groups) == available
