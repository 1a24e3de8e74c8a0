"""Peaks by the names that drivers report; a name with an unknown word has none."""

import pytest

from shardwise.estimates.device_peaks import peak_flops
from shardwise_plan.device_specs import load_device
from tests.rows import rows_of

ROWS = rows_of(__file__)


@pytest.mark.parametrize("name", ROWS["published"])
def test_published_peaks(name: str) -> None:
    for dtype, peak in zip(("bfloat16", "float32"), ROWS["published"][name], strict=True):
        assert peak_flops(name, dtype) == (None if peak is None else pytest.approx(peak * 1e12))


def test_an_unknown_peak_is_none_and_a_core_has_half_of_a_logical_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ROWS["unknown"]:
        assert peak_flops(name, "bfloat16") is None
    assert peak_flops("trn2", "bfloat16") == load_device("trn2").bfloat16
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert peak_flops("trn2", "bfloat16") == load_device("trn2").bfloat16 / 2
    assert peak_flops("trn1", "bfloat16") == load_device("trn1").bfloat16, "its cores are not joined"


@pytest.mark.parametrize(("key", "reported"), ROWS["planned"].items())
def test_plans_and_trainings_divide_by_the_same_peak(key: str, reported: str) -> None:
    device = load_device(key)
    assert [peak_flops(reported, "bfloat16"), peak_flops(reported, "float32")] == [device.bfloat16, device.float32]
