"""The time of a step: limits that follow from the device and from overlap, the simulation, and the published runs."""

import importlib
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError
from shardwise.config import Config, check_layout, load_config
from shardwise.estimates.memory import expected_memory
from shardwise_plan.device_seconds import LinkedRanks, collective, matmul, shipped_constants
from shardwise_plan.device_specs import Cluster, DeviceLink, device_names, load_device, parse_cluster
from shardwise_plan.overlap import Product, TensorCollectives, TensorOverlap
from shardwise_plan.program_traits import ProgramTraits
from shardwise_plan.step_time import StepTime, shardwise_traits, step_time
from tests.arch.source import ROOT

A100 = load_device("a100")


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for folder in ("benchmarks", "scripts"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(
            (str(ROOT / "benchmarks"), str(ROOT / "scripts"))
        ):
            del sys.modules[name]


MACHINES = parse_cluster("h100:8", 16)


def timed(config: Config, on: Cluster, program: ProgramTraits | None = None) -> StepTime:
    return step_time(config, check_layout(config, on.world), on, program)


def gpt3(*overrides: str) -> Config:
    return load_config("gpt3-175b", ["parallel.tensor=8", "parallel.pipeline=8", "train.global_batch=64", *overrides])


def llama2(*overrides: str) -> Config:
    return load_config("llama2-7b", ["parallel.tensor=1", *overrides])


def seconds_of(nbytes: float, on: Cluster) -> float:
    """Which memory takes for so many bytes."""
    return nbytes / (on.device.memory_bandwidth * shipped_constants().memory)


@pytest.mark.slow
def test_published_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors that benchmarks/results/planner.md publishes, and that what is fitted is only what may be.

    `scripts/fit_planner.py` gives the constants that are committed, from its start and the rows of the split.
    """
    import fit_planner
    import planner
    import published

    monkeypatch.setattr(planner, "compared", cache(planner.compared))
    fitting = published.fitting_rows()
    assert {row.source.partition(" (")[0] for row in fitting} == {published.FITTED_SOURCE}
    assert len(fitting) == 225
    assert fit_planner.fit(fitting)[0] == shipped_constants()
    rows = planner.compared()
    on_device = Counter(one.row.cluster.device.key for one in rows)
    expected = {name: on_device[name] for name in device_names()}
    assert {name: load_device(name).compared_runs for name in device_names()} == expected
    for part, most in (
        ("2104.04473 table 1", 0.08), ("2104.04473 table 2", 0.08), ("2205.05198 table 5", 0.08),
        ("bigscience", 0.09), ("aws-neuron", 0.095), ("README_175b", 0.025), ("nemotron/", 0.06),
        ("Megatron-Bridge", 0.06), ("llama3.1/README.md (741c886", 0.045), ("llm-foundry", 0.079), ("mlcommons", 0.062),
    ):  # fmt: skip
        assert statistics.mean(abs(one.error) for one in rows if part in one.row.source) < most, part
    many_nodes = [one for one in rows if "ground_truth_multi" in one.row.source]
    of_39_1b = [abs(one.error) for one in many_nodes if one.row.model.endswith("39.1B")]
    others = [abs(one.error) for one in many_nodes if not one.row.model.endswith("39.1B")]
    assert len(of_39_1b) == 47
    assert statistics.mean(of_39_1b) < 0.1
    assert statistics.mean(others) < 0.075
    given = [one.error for one in rows if "README_175b" in one.row.source or "nemotron/" in one.row.source]
    assert max(map(abs, given)) < 0.09
    fitted_rows = [one for one in rows if one.row.is_fitted]
    assert {planner.role(one.row) for one in fitted_rows} == {"fit"}
    assert planner.report() == planner.RESULT.read_text(encoding="utf-8")


def test_gradients_are_added_for_each_micro_batch() -> None:
    """8 bytes for a parameter where products add to what is there in float32, and 10 where ZeRO-2 adds bfloat16."""

    def accumulation(*overrides: str) -> float:
        return timed(gpt3("compile.enabled=true", *overrides), MACHINES).accumulation

    half = accumulation("precision.gradient=bfloat16", "precision.reduce=bfloat16")
    blocks = 12 * 12 * 12288**2 / 8  # of a pipeline rank's 12 blocks, on one of 8 tensor-parallel ranks
    micro_batches = 64 // 2
    a_byte = seconds_of(micro_batches * blocks, MACHINES)
    assert accumulation() - half == pytest.approx((8 - 6) * a_byte, rel=0.01)
    assert accumulation("optimizer.zero=2") - half == pytest.approx((10 - 6) * a_byte, rel=0.01)


def test_new_weights_travel_behind_the_next_forward_pass() -> None:
    """All but those of its first unit; on CPU ranks none do. Behind it, NCCL's kernels take 16 of 132 processors."""
    config = llama2("train.global_batch=64")

    def gather(device: str, **traits: bool) -> float:
        on = parse_cluster(device, 2)
        return timed(config, on, replace(shardwise_traits(config, on), **traits)).gather

    layers = config.known_shapes.num_hidden_layers
    whole = gather("h200:8", overlaps=False)
    first = whole / (layers + 1)
    assert gather("h200:8") == pytest.approx(first + (whole - first) * 16 / 132)
    assert gather("cpu:8") == gather("cpu:8", overlaps=False)


def test_biases_read_the_gradients_of_outputs() -> None:
    on = parse_cluster("a100:8", 1)
    seconds = []
    for overrides in ([], ["model.attention_bias=true", "model.mlp_bias=true"]):
        config = llama2("train.global_batch=8", *overrides)
        seconds.append(timed(config, on, ProgramTraits(separate_kernels=True)).memory_bound)
    model = config.known_shapes
    outputs = (3 + 1 + 1) * model.hidden_size + 2 * model.intermediate_size
    read = 2 * model.num_hidden_layers * config.train.sequence_length * outputs
    assert seconds[1] - seconds[0] == pytest.approx(seconds_of(read, on))


CONTEXT = ("parallel.sequence=false", "parallel.context=8", "train.recompute=none", "train.global_batch=8")


def test_keys_that_come_rank_by_rank_travel_while_attention_computes() -> None:
    """What is left of the time of gathers and scatters is that beyond 7 of 8 parts of attention."""

    def seconds(how: str, length: int) -> StepTime:
        lengths = (f"train.sequence_length={length}", f"model.max_position_embeddings={length}")
        config = llama2(*CONTEXT, "compile.enabled=false", *lengths, f"parallel.context_keys={how}")
        return timed(config, parse_cluster("a100:8", 2))

    gathered, passed = (seconds(how, 4096) for how in ("gather", "ring"))
    forward = passed.attention - gathered.attention  # computed again in the backward pass
    assert forward > 0
    backward = gathered.attention - forward
    shares = (gathered.context / 3 - 7 / 8 * forward, 2 * gathered.context / 3 - 7 / 8 * (backward + forward))
    assert passed.context == pytest.approx(sum(max(0.0, share) for share in shares))
    assert 0 < passed.context < gathered.context
    assert seconds("ring", 2**17).context == 0


def test_fp8_products_take_less_time_and_memory_where_a_device_has_them() -> None:
    """A product in fp8 takes half as long where it reaches the same part of the peak; rounding takes time too."""
    keys = ("train.global_batch=64", "compile.enabled=true", "train.recompute=none")
    bfloat16, fp8 = llama2(*keys), llama2(*keys, "precision.matmul=fp8")
    h200 = parse_cluster("h200:8", 2)
    like_bfloat16 = replace(h200.device, fp8_matmul_share=None, fp8_backward_share=1.0)
    wide, narrow = (timed(config, replace(h200, device=like_bfloat16)) for config in (bfloat16, fp8))
    measured = timed(fp8, h200)
    layout = check_layout(fp8, 16)
    wide_memory, narrow_memory = (expected_memory(config, layout, True) for config in (bfloat16, fp8))
    assert narrow.matmul == pytest.approx(wide.matmul / 2, rel=1e-6)
    assert narrow.matmul * 0.7 / 0.68 < measured.matmul < narrow.matmul * 0.7 / 0.68 / 0.87
    assert narrow.memory_bound > wide.memory_bound
    assert narrow.total < wide.total
    assert narrow_memory.activations < 0.9 * wide_memory.activations
    refused = r"precision.matmul \(fp8\) must be left out on NVIDIA A100 80GB SXM, whose device file has no fp8_tf"
    with pytest.raises(ConfigError, match=refused):
        timed(fp8, parse_cluster("a100:8", 2))


def test_steps_of_one_h200_take_what_was_measured() -> None:
    """Compiled and eager, of all settings of the last measurement."""
    page = (ROOT / "benchmarks" / "results" / "first_gpu_step.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (eager|compiled) *\| *(\w+) \| +(?:27 → )?(\d+) \| +(\d+) of (\d) \| +[\d,]* \| +([\d,]+) \|",
        page,
        re.MULTILINE,
    )
    assert len(rows) == 15
    errors: dict[str, list[float]] = {"eager": [], "compiled": []}
    for program, recompute, blocks, micro_batches, micro_batch, measured in rows:
        config = llama2(
            "parallel.sequence=false", "optimizer.zero=0", "precision.mode=mixed",
            f"compile.enabled={str(program == 'compiled').lower()}", f"model.num_hidden_layers={blocks}",
            f"train.recompute={recompute}", f"train.micro_batch={micro_batch}",
            f"train.global_batch={int(micro_batch) * int(micro_batches)}",
        )  # fmt: skip
        time = timed(config, parse_cluster("h200:1"))
        errors[program].append(1000 * time.total / float(measured.replace(",", "")) - 1)
    assert max(map(abs, errors["compiled"])) < 0.015, errors
    assert max(map(abs, errors["eager"])) < 0.025, errors


def test_a_host_that_does_not_run_ahead_adds_all_its_time() -> None:
    ahead, blocked = (timed(gpt3(), MACHINES, ProgramTraits(runs_ahead=runs)) for runs in (True, False))
    kernels = 32 * 12 * 2.6 * 24  # micro-batches, blocks, both passes, kernels of a block
    assert blocked.launch > kernels * shipped_constants().host * 0.99
    assert blocked.launch > 10 * ahead.launch


def test_products_and_collectives_take_what_was_measured() -> None:
    """A tile more than there are processors; rows of a batched product without 16 bytes, for no tensor cores."""

    def seconds(m: int, n: int, k: int, batch: int = 1) -> float:
        return matmul(A100, shipped_constants(), A100.bfloat16, m, n, k, batch)

    assert seconds(256, 128 * 109, 4096) > 1.3 * seconds(256, 128 * 108, 4096)
    assert seconds(2048, 2048, 108, 32) > 4 * seconds(2048, 2048, 104, 32)
    assert seconds(2048, 2048, 108) < 1.2 * seconds(2048, 2048, 104)
    # An all-reduce over 2, 4 and 8 A100 of a node: VIA-Research/vTrain, trace/a100.
    measured = {(2, 2**20): 45e-6, (4, 2**20): 53e-6, (8, 2**20): 92e-6, (8, 2**26): 580e-6, (8, 2**30): 8.2e-3}
    for (ranks, size), seconds in measured.items():
        found = collective(A100, shipped_constants(), LinkedRanks(ranks, ranks), size, reduces_all=True)
        assert found == pytest.approx(seconds, rel=0.2), (ranks, size)


def test_pages_have_the_predicted_gains_of_switches() -> None:
    """Of each of `train.switches` alone; one page has that of all together too."""
    predicted = importlib.import_module("first_gpu.switches").published()
    for page in ("docs/performance.md", "benchmarks/results/switches.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        rows = {name: float(gain) for name, gain in re.findall(r"^\| `(\w+)`.*?\| ([\d.]+)%", text, re.M)}
        assert rows == {name: round(100 * gain, 1) for name, gain in predicted.items() if name != "all"}, page
        assert "57.3%" in text, page
    assert f"| all three | {100 * predicted['all']:.1f}%" in text


H100 = load_device("h100")
EIGHT = LinkedRanks(8, 8)
SIZE = 1e8
OVERLAPS: tuple[TensorOverlap, ...] = ("pieces", "symmetric_memory", "user_buffers")


def _collectives(
    overlap: TensorOverlap | None, bandwidth: float = H100.node.bandwidth, sequence_parallel: bool = True
) -> TensorCollectives:
    device = replace(H100, node=DeviceLink(bandwidth, 0.0, "switch"))
    return TensorCollectives(device, shipped_constants(), EIGHT, SIZE, SIZE, sequence_parallel, overlap)


def _even(seconds: float) -> Product:
    """A product that loses nothing when it is cut."""
    return lambda pieces: seconds / pieces


def test_behind_a_long_product_the_first_or_last_piece_remains() -> None:
    sent = SIZE * 7 / 8 / (H100.node.bandwidth * shipped_constants().node)
    pieces = _collectives("pieces")
    assert pieces.gather_before(_even(1.0)) == pytest.approx(shipped_constants().start + sent / 4)
    assert pieces.sum_after(_even(1.0)) == pytest.approx(shipped_constants().start + sent / 4)
    assert pieces.sum_behind(_even(1.0)) == 0
    ring = _collectives("symmetric_memory")
    assert ring.gather_before(_even(1.0)) == pytest.approx(0, abs=1e-12)
    assert ring.sum_after(_even(1.0)) == pytest.approx(0, abs=1e-12)
    # The sum's kernels take 16 of 132 processors while they run.
    buffers = _collectives("user_buffers")
    assert buffers.gather_before(_even(1.0)) == pytest.approx(0, abs=1e-12)
    assert buffers.sum_after(_even(1.0)) == pytest.approx(sent / 4 + sent * 16 / 116)


@given(seconds=st.floats(1e-6, 1e-1), bandwidth=st.floats(1e9, 1e12))
@pytest.mark.parametrize("overlap", OVERLAPS)
@settings(deadline=None)
def test_overlap_never_hides_more_than_there_is(overlap: TensorOverlap, seconds: float, bandwidth: float) -> None:
    both = _collectives(overlap, bandwidth)
    sent = SIZE * 7 / 8 / (bandwidth * shipped_constants().node)
    for added in (both.gather_before, both.sum_after, both.sum_behind):
        exposed = added(_even(seconds))
        assert exposed >= max(0.0, sent - seconds) * (1 - 1e-9)
        assert exposed <= shipped_constants().start + sent * (1 + 16 / 116)


def test_the_recipe_names_the_overlap_and_a_cpu_has_none() -> None:
    config = load_config("llama2-7b", ["parallel.tensor=2", "parallel.tensor_overlap=pieces"])
    assert shardwise_traits(config, parse_cluster("h100:8")).tensor_overlap == "pieces"
    assert shardwise_traits(config, parse_cluster("cpu:2")).tensor_overlap is None
