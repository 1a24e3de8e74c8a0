"""`shardwise plan`: the list, what is kept, what is written, and what is refused."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardwise.base import units
from shardwise.base.prices import Price
from shardwise.config import check_layout, load_config, size_stages_of
from shardwise.config.recipe_files import carried_comments
from shardwise.estimates.memory import expected_memory
from shardwise_plan import device_specs
from shardwise_plan.cli.wording import _PUBLISHED_ERROR
from shardwise_plan.data_stages import run_with_layout
from shardwise_plan.device_specs import load_device, parse_cluster
from tests.command_line import CommandLine

REPLACED = "train it with (replace YOUR_… by the paths of your data)"
FEW = ("parallel.tensor=8", "train.micro_batch=1", "parallel.schedule=1f1b", "optimizer.zero=1")
LEAST_RATIO, MOST_RATIO = 1 / (1 + _PUBLISHED_ERROR), 1 / (1 - _PUBLISHED_ERROR)
RANGE = f"{LEAST_RATIO - 1:+.0%} to {MOST_RATIO - 1:+.0%}"
GPT = ("plan", "gpt3-23b", "--device", "h100:8", "--nodes", "4", "train.global_batch=256")
LLAMA = ("plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1")
SMALL = (*LLAMA, "train.micro_batch=1", "optimizer.zero=1")


def rewritten(text: str) -> str:
    """On one line, wherever it was broken."""
    return " ".join(text.split())


def test_best_layouts_first_and_each_fits(cli: CommandLine, tmp_path: Path) -> None:
    written = tmp_path / "best.yaml"
    plans = cli.facts(*GPT, "train.micro_batch=1", "--write", written, "--layout", "1")["plans"]
    assert 3 <= len(plans) <= 10
    assert plans == sorted(plans, key=lambda plan: plan["step_seconds"])
    assert all(plan["headroom_bytes"] >= 0 for plan in plans)
    assert all(sum(plan["parts_seconds"].values()) == pytest.approx(plan["step_seconds"]) for plan in plans)
    best = load_config(str(written))
    layout = check_layout(best, 32)
    chosen = plans[0]["layout"]
    assert (layout.tensor, best.parallel.schedule) == (chosen["tensor"], chosen["schedule"])
    splits = best.parallel.schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")
    assert best.compile.enabled != splits, "blocks are compiled on CUDA where the schedule allows it"
    memory = expected_memory(best, layout, accelerator=True)
    assert memory.total == plans[0]["memory_bytes"], "what is written needs what the list says"


def test_layout_n_writes_the_nth_of_the_list(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [*GPT, "train.micro_batch=1", "optimizer.zero=1"]
    third = cli.facts(*few)["plans"][2]["layout"]
    assert "--layout (3) must go with --write FILE" in cli.refused(*few, "--layout", "3")
    written = tmp_path / "third.yaml"
    said = cli.refused(*few, "--write", written, "--layout", "99")
    assert "--layout (99) must be a layout of the list, 1 to " in said

    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("shardwise.cli.output.json", closed)
    monkeypatch.setattr("shardwise.cli.entry.os.dup2", lambda *_: None)
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1)
    err = cli(*few, "train.steps=300B", "--json", "--write", written, "--layout", "3", code=1).err
    assert "  steps: 300B\n" in written.read_text(encoding="utf-8")
    command = f"shardwise submit {written} --nodes 4 --device h100:8 launch.ranks_per_node=8"
    fits = r"which leaves [\d.]+ .iB of memory and may not fit"
    assert re.search(rf" with layout 3, {fits}, predicted to take \d+ d \d+ h to \d+ d \d+ h; train it with ", err)
    assert f"{REPLACED}: {command} data.path=YOUR_TEXT.jsonl data.tokenizer=YOUR_TOKENIZER_FOLDER\n" in err
    config = load_config(str(written))
    layout = check_layout(config, 32)
    assert (layout.tensor, layout.pipeline) == (third["tensor"], third["pipeline"])
    assert (config.train.micro_batch, config.train.recompute) == (third["micro_batch"], third["recompute"])


def test_a_written_recipe_has_the_comments_that_its_training_needs(cli: CommandLine, tmp_path: Path) -> None:
    fixed = ["--device", "h200:8", "parallel.tensor=8", "parallel.pipeline=1", "train.micro_batch=1"]
    first = tmp_path / "first.yaml"
    command = f"{REPLACED}: shardwise train {first} data.path=YOUR_TEXT.jsonl data.tokenizer=YOUR_TOKENIZER_FOLDER\n"
    said = cli("plan", "llama2-7b", *fixed, "model.vocab_size=32768", "--write", first)
    assert said.err.endswith(command)
    comments = [line for line in first.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert comments[1].startswith("# Learning rate:  ")
    assert comments[3].endswith(" optimizer.lr=3e-4 optimizer.warmup_steps=100")
    assert re.match(r"# Your own data:  .*YOUR_TOKENIZER_FOLDER$", comments[4]), "without the recipe's vocabulary"
    longer = "# Before longer texts: "
    assert longer in carried_comments("llama3.1-8b", load_config("llama3.1-8b"))
    shorter = ["model.max_position_embeddings=8192", "model.rope_scaling=null"]
    assert longer not in carried_comments("llama3.1-8b", load_config("llama3.1-8b", shorter))
    second = tmp_path / "second.yaml"
    said = cli("plan", first, *fixed, "data.dataset=tiny", "optimizer.lr=3e-4", "--write", second)
    assert said.err.endswith(f"train it with: shardwise train {second}\n")
    assert second.read_text(encoding="utf-8").count("#") == 1


def test_given_keys_are_kept_and_two_are_compared(cli: CommandLine) -> None:
    kept = ["parallel.tensor=4", "train.recompute=full", "parallel.schedule=1f1b"]
    text = cli(*GPT, *kept, "--why", "1", "2").out
    assert (text.count("TP 4"), text.count("recompute full")) == (2, 2)
    assert "difference" in text


def _rows(text: str) -> list[tuple[str, str]]:
    """The number and the layout of each row: its first line has the degrees, further ones the details."""
    lines = text.split("\n\n")[2].splitlines()[1:]
    rows: list[tuple[str, str]] = []
    for line in lines:
        first = re.match(r" *(\d+)  (TP .*?)  ", line)
        if first is not None:
            rows.append((first[1], f"{first[2]},"))
        else:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
    return rows


def test_layouts_that_differ_in_details_are_left_out_and_counted(cli: CommandLine, tmp_path: Path) -> None:
    small = [*LLAMA, "--device", "h100:8"]
    out, err = cli(*small, "--write", tmp_path / "roomy.yaml")
    frees = re.findall(r"^ *\d+  TP .*  (!?)[\d.]+ .iB  +[\d dhmin]+$", out, re.MULTILINE)
    roomy = frees.index("") + 1
    assert roomy > 1
    assert f" with layout {roomy}, the first that leaves a tenth of the memory free, predicted to take " in err
    every = cli(*small, "--all").out
    listed, all_rows = map(_rows, (out, every))
    for rows in (listed, all_rows):
        assert [number for number, _ in rows] == [str(number) for number in range(1, len(rows) + 1)]
    layouts, all_layouts = ([layout for _, layout in rows] for rows in (listed, all_rows))
    assert set(layouts) < set(all_layouts)
    left_out = all_layouts.index(layouts[-1]) + 1 - len(layouts)
    assert f"Left out: {units.counted(left_out, 'layout')} at most 4% slower than " in rewritten(out)
    assert "Left out" not in every
    assert len({re.sub("recompute (none|selective)", "", layout) for layout in all_layouts}) == len(all_layouts)
    assert " equal a listed layout: their recompute changes neither time nor memory" in rewritten(every)
    assert "\nLearning rate: linear, 2e-05 to 0; 2,000 steps of warmup\n" in out
    assert f"2: {layouts[1]}\n" in cli(*small, "--why", "1", "2").out, "--why takes the numbers of the rows"
    assert '"!": less than 10% of the device\'s memory is free.' in out
    assert max(map(len, out.splitlines())) <= 80
    (counts,) = re.findall(r"^Of ([\d,]+) layouts, these were dropped:\n((?: .*\n)+)", out, re.MULTILINE)
    dropped = sum(int(number.replace(",", "")) for number in re.findall(r"^ +([\d,]+)  ", counts[1], re.MULTILINE))
    assert dropped + len(all_layouts) == int(counts[0].replace(",", ""))
    assert re.search(rf" A step of layout {roomy}: matmul \d\d\.\d%, attention .*optimizer ", rewritten(out))
    assert re.search(rf"^Fastest.*: layout {roomy} on 8 devices, ", out, re.MULTILINE), "as --write chooses"


def test_several_devices_stand_side_by_side(cli: CommandLine, tmp_path: Path) -> None:
    cheap = tmp_path / "cheap.yaml"
    text = device_specs.shipped_device_text("h100").replace("NVIDIA H100 SXM\n", "Ours\n")
    cheap.write_text(f"{text}price_per_hour: 2 USD\n", encoding="utf-8")
    devices = f"h100:8,{cheap}:8, a100-40gb:1"
    out = cli(*SMALL, "--device", devices).out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(r"^devices +step +MFU +free +time +USD$", lines[0])
    assert lines[1].startswith("8 × NVIDIA H100 SXM")
    text = rewritten(out)
    row = r"8 × Ours \(1 node × 8\) [\d.]+ s [\d.]+% !?[\d.]+ .iB \d+ \w [\d]+ \w+ ([\d,]+) TP "
    (prices,) = re.findall(rf"{row}.*? and ([\d,]+) to ([\d,]+) USD, {re.escape(RANGE)}", text)
    price, least_price, most_price = (float(cell.replace(",", "")) for cell in prices)
    assert (least_price / LEAST_RATIO, most_price / MOST_RATIO) == pytest.approx((price, price), rel=0.02)
    assert "a100-40gb:1: no layout fits " in text
    assert "Predictions for these devices probably err in the same direction: their order is surer" in text
    facts = cli.facts(*SMALL, "--device", devices)
    assert facts["devices"]["h100:8"]["cost"] is None
    own = facts["devices"][f"{cheap}:8"]
    assert own["cost"] == pytest.approx(2 * own["device_hours"]) == pytest.approx(price, rel=0.01)
    assert list(facts["problems"]) == ["a100-40gb:1"]
    by_energy = cli.facts(*SMALL, "--device", "h100:8,b200:8", "--objective", "energy")["devices"]
    energy = [plan["kilowatt_hours"] for plan in by_energy.values()]
    assert energy == sorted(energy)


@pytest.mark.parametrize("device", ["trn2:64", "h100:8"])
def test_a_proposed_pipeline_on_trainium_is_warned_of(device: str, cli: CommandLine) -> None:
    small = [*LLAMA[:3], "train.micro_batch=1", "parallel.pipeline=2", "parallel.tensor=4"]
    told = "\nparallel.pipeline (2) is refused by TorchNeuron's copy of" in cli(*small, "--device", device).out
    assert told == device.startswith("trn")


@pytest.mark.parametrize(
    ("device", "shown"),
    [
        ("h200:8", "steps on one H200 were predicted within 3%; nine in ten published steps on A100"),
        ("trn1:32", "nine in ten of 39 published steps on AWS Trainium1 (a NeuronCore) were predicted within"),
        *((device, "no published run on this device was compared;") for device in ("trn2:64", "{file}:8")),
    ],
)
def test_the_accuracy_stands_below_the_list(device: str, shown: str, cli: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("base: h100\nconstants: {node: 0.6}\n", encoding="utf-8")
    small = [*LLAMA, "parallel.tensor=2", "--nodes", "2"]
    out, _, accuracy = cli(*small, "--device", device.format(file=file)).out.rpartition("\nAccuracy: ")
    proposed = re.search(r"^Fastest.*: (layout \d+) on ", out, re.MULTILINE)
    assert (f": {proposed[1]} takes " in rewritten(accuracy)) == ("no published run" not in shown)
    assert rewritten(accuracy).startswith(shown)
    assert accuracy.endswith("(docs/planner.md#how-far-off-it-is)\n")


def test_a_shipped_device_is_shown_as_a_file_that_describes_it(cli: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(cli("plan", "--show-device", "a100").out, encoding="utf-8")
    assert replace(device_specs.load_device(str(file)), key="a100-80gb") == device_specs.load_device("a100")


def test_refused(cli: CommandLine) -> None:
    for line, message in yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text(encoding="utf-8")).items():
        nodes = [] if "--nodes" in line or "--budget" in line else ["--nodes", "1"]
        words = [*shlex.split(line.removesuffix("FEW")), *FEW * line.endswith("FEW"), *nodes]
        said = cli.refused("plan", "gpt3-23b", "train.global_batch=256", "--device", *words)
        assert re.search(message, said, re.DOTALL), line


def test_a_run_in_stages_is_written_with_the_micro_batch_of_each(cli: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "planned.yaml"
    long = "sequence_length: 2048, global_batch: 8, micro_batch: 1"
    stages = f"data.stages=[{{at: 10, rope_theta: 1000.0}}, {{at: 18, {long}}}]"
    sizes = ("train.steps=20", "train.global_batch=256", "train.micro_batch=4", "model.max_position_embeddings=2048")
    machines = ("--device", "h100:8", "--nodes", "1", "parallel.tensor=1", "parallel.pipeline=1")
    cli("plan", "llama3-tiny", *machines, "--write", path, *sizes, stages)
    written = load_config(str(path))
    assert written.train.steps == 20
    assert check_layout(written, 8).data == 8
    trains = [stage.train for stage in size_stages_of(written)]
    sizes_of = [(train.sequence_length, train.global_batch, train.micro_batch) for train in trains]
    assert sizes_of == [(64, 256, 4), (64, 256, 4), (2048, 8, 1)]
    assert [stage.rope_theta for stage in written.data.stages] == [1000.0, None]
    longest = size_stages_of(load_config("llama3-tiny", [*sizes, stages]))[-1]
    planned = run_with_layout(longest, check_layout(longest, 8))
    assert "compile" not in planned.model_fields_set, "neither the recipe nor this layout sets it"


def test_offloaded_state_lets_a_large_model_fit_on_one_device(cli: CommandLine) -> None:
    command = ["plan", "llama2-7b", "--device", "h100:1", "--nodes", "1", "train.global_batch=8"]
    assert "no layout fits" in cli.refused(*command)
    cli(*command, "optimizer.offload=true")


def test_budget_finds_the_fewest_nodes(cli: CommandLine) -> None:
    fixed = ["parallel.pipeline=1", "optimizer.zero=1"]
    few = ["plan", "llama2-7b", "--device", "h100:8", "train.global_batch=256", *fixed]
    facts = cli.facts(*few, "--budget", "30 days")
    plan = facts["plans"][0]
    assert plan["days"] <= 30
    assert facts["budget"].endswith(f" it in 30 days, even if steps take {MOST_RATIO - 1:.0%} longer than predicted")
    close = f"{1.1 * plan['days']:.2f} days"
    late = f"if steps take {MOST_RATIO - 1:.0%} longer than predicted, 2 nodes are needed"
    said = rewritten(cli(*few, "--budget", close).out)
    assert f"1 node of 8 trains it in {close}, as predicted; {late}" in said
    # The numbers that are tried first are 4 and 6.
    whole = ["plan", "llama2-7b", "--device", "h100:8", "train.global_batch=240", *fixed]
    on_five = cli.facts(*whole, "--nodes", "5")["plans"][0]["days"]
    told = cli.facts(*whole, "--budget", f"{1.001 * on_five:.6f} days")["budget"]
    assert told.startswith("5 nodes of 8 train it in ")


def test_a_dry_run_for_a_cluster_tells_whether_it_fits_and_how_long_checkpoints_are_apart(cli: CommandLine) -> None:
    command = ["train", "llama2-7b", "--dry-run", "--device", "h100:8", "parallel.pipeline=1", "checkpoint.every=1000"]
    code = f"import sys; from shardwise.cli.entry import main; main({command}); assert 'torch' not in sys.modules"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "8 × NVIDIA H100 SXM (1 node × 8)" in text
    assert re.search(r"^#   memory +[\d.]+ GiB free beside a reserve of 6% of the device's 74\.5 GiB \(", text, re.M)
    (seconds,) = re.findall(r"^# step +([\d.]+) s predicted", text, re.M)
    every = r"^# checkpoints +every 1,000 steps \(about (\d) h (\d+) min\), every 30 minutes and "
    ((hours, minutes),) = re.findall(every, text, re.M)
    assert 60 * int(hours) + int(minutes) == pytest.approx(1000 / 60 * float(seconds), rel=0.02)
    shown = cli(*command, "parallel.tensor=1", "train.micro_batch=8", "launch.nodes=2", code=2)
    assert "16 × NVIDIA H100 SXM (2 nodes × 8)" in shown.out
    assert re.search(r"^#   memory +does not fit: \d+ GiB are needed beside a reserve of 6% ", shown.out, re.M)
    most = r"on each rank \(\d+ GiB\) must be at most that of NVIDIA H100 SXM \(74\.5 GiB\): raise"
    assert re.search(most, shown.err)
    said = cli.refused(*command, "launch.nodes=2", "--nodes", "1", "--nproc", "8")
    assert "without --nproc, --nodes gives the machines" in said


def test_numbers_of_nodes_are_compared_by_objective_and_budget(cli: CommandLine) -> None:
    command = [*GPT, *FEW, "--nodes", "4,8", "--price", "2 USD", "--objective"]
    by_time, by_cost = (cli.facts(*command, objective) for objective in ("time", "cost"))
    plans = by_time["plans"]
    assert plans == sorted(plans, key=lambda plan: plan["days"])
    assert by_cost["plans"] == sorted(by_cost["plans"], key=lambda plan: plan["cost"])
    assert {plan["nodes"] for plan in plans} == {4, 8}
    assert (plans[0]["nodes"], by_cost["plans"][0]["nodes"]) == (8, 4)
    proposed = by_time["proposals"]
    named = {name: plans[proposal["layout"] - 1] for proposal in proposed for name in proposal["names"]}
    assert set(named) == {"fastest", "cheapest", "most robust"}
    assert named["fastest"]["days"] == min(plan["days"] for plan in plans)
    assert named["cheapest"]["device_hours"] == min(plan["device_hours"] for plan in plans)
    for proposal in proposed:
        seconds = 86_400 * plans[proposal["layout"] - 1]["days"]
        changed = list(proposal["sensitivity_seconds"].values())
        assert all(seconds < other < changed[-1] for other in changed[:3])
    # No layout fits 12 nodes or 24, as three times a power of two does not divide the batch.
    few = [*FEW, "parallel.pipeline=2", "train.global_batch=32"]
    command = ["plan", "gpt3-23b", "--device", "h100:8", "--price", "2 USD", *few]
    cost = cli.facts(*command, "--nodes", "32")["plans"][0]["cost"]
    facts = cli.facts(*command, "--budget", f"{cost + 1:,.0f} USD")
    assert facts["plans"][0]["nodes"] == 32
    assert re.match(r"32 nodes train it for [\d,]+ USD in \d+ d \d\d h$", facts["budget"])


def test_compared_clusters_with_own_batches_train_the_same_tokens(cli: CommandLine, tmp_path: Path) -> None:
    written = tmp_path / "best.yaml"
    command = ["plan", "gpt3-175b", "--device", "h100:8", "--price", "2 USD", *FEW]
    # The recipe's rule is 256 sequences for 256 ranks, which are 32 nodes.
    facts = cli.facts(*command, "--nodes", "32,64", "--write", written)
    plans = facts["plans"]
    assert {plan["nodes"]: plan["steps"] for plan in plans} == {32: 300_000, 64: 150_000}
    assert {plan["tokens"] for plan in plans} == {300_000 * 256 * 2048}
    assert facts["steps"].endswith(" for 157 billion tokens in all: 300,000 steps on 256 devices, 150,000 on 512")
    best = load_config(str(written)).with_batch_for(512)
    assert (best.train.steps, best.train.global_batch, best.optimizer.constant_steps) == (150_000, 512, 40_000)
    cheapest = min(plans, key=lambda plan: plan["cost"])
    for plan in cli.facts(*command, "--budget", f"{1.001 * cheapest['cost']:.0f} USD")["plans"]:
        step_tokens = plan["tokens"] / plan["steps"]
        assert abs(plan["tokens"] - 300_000 * 256 * 2048) <= step_tokens / 2, "the nearest whole number of steps"
    # What a cluster trains by the recipe itself is not changed.
    facts = cli.facts(*command, "--nodes", "64")
    assert (facts["steps"], facts["plans"][0]["steps"]) == (None, 300_000)
    lines = cli(*command, "--nodes", "64", "--device", "h100:8,h200:4").out.splitlines()
    assert "300,000 steps on 256 devices, 150,000 on 512" in " ".join(lines)
    assert max(map(len, lines)) <= 80


def test_a_batch_that_no_layout_divides_is_told_with_what_it_must_be(cli: CommandLine) -> None:
    keys = ["train.global_batch=6", "train.micro_batch=1", "parallel.tensor=1", "parallel.pipeline=1"]
    assert re.search(
        r"no layout of the recipe is valid on 8 devices: .*; in its own layout, train\.global_batch \(6\) must be a "
        r"multiple of train\.micro_batch × data-parallel degree \(1 × 8 = 8\): nearest 8",
        cli.refused("plan", "llama2-tiny", "--device", "h100:8", *keys),
    )


def test_prices_of_devices_and_of_the_recipe(cli: CommandLine) -> None:
    small = [*SMALL, "--device", "h100:8,b200:8"]
    for price, each in (("2.50 USD,5.00USD", [2.5, 5.0]), ("4 usd", [4.0, 4.0])):
        plans = cli.facts(*small, "--price", price)["devices"].values()
        assert [plan["cost"] / plan["device_hours"] for plan in plans] == pytest.approx(each)
        assert {plan["currency"] for plan in plans} == {"USD"}
    said = cli.refused(*small, "--price", "2.50 USD,5.00 EUR")
    assert "--price (EUR and USD) must have one currency for all devices" in said
    # Other devices that are compared have other prices; `--price` replaces it.
    small = [*SMALL, "log.price=2.50 USD", "--json"]
    for device, more, each in (("h100:8", [], 2.5), ("h100:8", ["--price", "3 EUR"], 3.0), ("h100:8,b200:8", [], None)):
        found = json.loads(cli(*small, "--device", device, *more).out)
        plans = found["devices"].values() if "," in device else found["plans"][:1]
        costs = [plan.get("cost") and plan["cost"] / plan["device_hours"] for plan in plans]
        assert costs == pytest.approx([each] * len(plans))


@pytest.mark.parametrize(("per_node", "chips"), [(2, 1), (6, 2), (8, 2)])
def test_a_chip_is_paid_as_a_whole(per_node: int, chips: int) -> None:
    device = replace(load_device("trn2"), price=Price.of("2 USD/chip", "--price"))
    machines = replace(parse_cluster("trn2", 3), device=device, per_node=per_node)
    assert (machines.priced_units, machines.price_per_hour) == (3 * chips, 6 * chips)
