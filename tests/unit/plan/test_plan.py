"""`shardwise plan`: the list, what is kept, what is written, and what is refused."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.base import units
from shardwise.cli.entry import main
from shardwise.config import check_layout, load_config, stages_of
from shardwise.config.recipe_files import carried_comments
from shardwise.estimates.memory import expected_memory
from shardwise_plan import device_specs
from shardwise_plan.cli.rows import _PUBLISHED_ERROR
from shardwise_plan.run_stages import run_with_layout

_REPLACED = "train it with (replace YOUR_… by the paths of your data)"
FEW = ("parallel.tensor=8", "train.micro_batch=1", "parallel.schedule=1f1b", "optimizer.zero=1")
LEAST_RATIO, MOST_RATIO = 1 / (1 + _PUBLISHED_ERROR), 1 / (1 - _PUBLISHED_ERROR)
RANGE = f"{LEAST_RATIO - 1:+.0%} to {MOST_RATIO - 1:+.0%}"
GPT = ["gpt3-23b", "--device", "h100:8", "--nodes", "4", "train.global_batch=256"]


def test_best_layouts_first_and_each_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "best.yaml"
    assert main(["plan", *GPT, "train.micro_batch=1", "--json", "--write", str(written), "--layout", "1"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    seconds = [plan["step_seconds"] for plan in plans]
    assert 3 <= len(plans) <= 10
    assert seconds == sorted(seconds)
    assert all(plan["headroom_bytes"] >= 0 for plan in plans)
    assert all(sum(plan["parts_seconds"].values()) == pytest.approx(plan["step_seconds"]) for plan in plans)
    best = load_config(str(written))
    assert check_layout(best, 32).tensor == plans[0]["layout"]["tensor"]
    assert best.parallel.schedule == plans[0]["layout"]["schedule"]
    splits = best.parallel.schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")
    assert best.compile.enabled != splits, "blocks are compiled on CUDA where the schedule allows it"
    memory = expected_memory(best, check_layout(best, 32), accelerator=True)
    assert memory is not None
    assert memory.total == plans[0]["memory_bytes"], "what is written needs what the list says"


def test_any_layout_of_the_list_is_written_before_the_list(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [*GPT, "train.micro_batch=1"]
    assert main(["plan", *few, "--json"]) == 0
    third = json.loads(capsys.readouterr().out)["plans"][2]["layout"]
    assert main(["plan", *few, "--layout", "3"]) == 2
    assert "--layout (3) must go with --write FILE" in capsys.readouterr().err
    written = tmp_path / "third.yaml"
    assert main(["plan", *few, "--write", str(written), "--all", "--layout", "31"]) == 2
    assert "--layout (31) must be a layout of the list, 1 to 30" in capsys.readouterr().err

    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("shardwise.cli.output.json", closed)
    monkeypatch.setattr("shardwise.cli.entry.os.dup2", lambda *_: None)
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1)
    tokens = "train.steps=300B"
    assert main(["plan", *few, tokens, "--json", "--write", str(written), "--layout", "3"]) == 1
    assert "  steps: 300B\n" in written.read_text(encoding="utf-8")
    command = f"shardwise submit {written} --nodes 4 --device h100:8 launch.ranks_per_node=8"
    err = capsys.readouterr().err
    assert re.search(
        r" with layout 3, which leaves [\d.]+ .iB of memory and may not fit, predicted to take \d+ d \d+ h to \d+ d \d"
        r"+ h; train it with ",
        err,
    )
    assert f"{_REPLACED}: {command} data.path=YOUR_TEXT.jsonl data.tokenizer=YOUR_TOKENIZER_FOLDER\n" in err
    config = load_config(str(written))
    layout = check_layout(config, 32)
    assert (layout.tensor, layout.pipeline) == (third["tensor"], third["pipeline"])
    assert (config.train.micro_batch, config.train.recompute) == (third["micro_batch"], third["recompute"])


def test_a_written_recipe_has_the_comments_that_its_training_needs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fixed = ["--device", "h200:8", "parallel.tensor=8", "parallel.pipeline=1", "train.micro_batch=1"]
    first = tmp_path / "first.yaml"
    assert main(["plan", "llama2-7b", *fixed, "model.vocab_size=32768", "--write", str(first)]) == 0
    command = f"{_REPLACED}: shardwise train {first} data.path=YOUR_TEXT.jsonl data.tokenizer=YOUR_TOKENIZER_FOLDER\n"
    assert capsys.readouterr().err.endswith(command)
    comments = [line for line in first.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert comments[1].startswith("# Learning rate:  ")
    assert comments[3].endswith(" optimizer.lr=3e-4 optimizer.warmup_steps=100")
    assert re.match(r"# Your own data:  .*YOUR_TOKENIZER_FOLDER$", comments[4]), "without the recipe's vocabulary"
    longer = "# Before longer texts: "
    assert longer in carried_comments("llama3.1-8b", load_config("llama3.1-8b"))
    shorter = ["model.max_position_embeddings=8192", "model.rope_scaling=null"]
    assert longer not in carried_comments("llama3.1-8b", load_config("llama3.1-8b", shorter))
    second = tmp_path / "second.yaml"
    others = ["data.dataset=tiny", "optimizer.lr=3e-4"]
    assert main(["plan", str(first), *fixed, *others, "--write", str(second)]) == 0
    assert capsys.readouterr().err.endswith(f"train it with: shardwise train {second}\n")
    assert second.read_text(encoding="utf-8").count("#") == 1


def test_given_keys_are_kept_and_two_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    kept = ["parallel.tensor=4", "train.recompute=full", "parallel.schedule=1f1b"]
    assert main(["plan", *GPT, *kept, "--why", "1", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("TP 4") == 2
    assert text.count("recompute full") == 2
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


def test_layouts_that_differ_in_details_are_left_out_and_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = ["plan", "llama2-7b", "--device", "h100:8", "parallel.pipeline=1", "train.global_batch=64"]
    assert main([*small, "--write", str(tmp_path / "roomy.yaml")]) == 0
    out, err = capsys.readouterr()
    frees = re.findall(r"^ *\d+  TP .*  (!?)[\d.]+ .iB  +[\d dhmin]+$", out, re.MULTILINE)
    roomy = frees.index("") + 1
    assert roomy > 1
    assert f" with layout {roomy}, the first that leaves a tenth of the memory free, predicted to take " in err
    assert main([*small, "--all"]) == 0
    every = capsys.readouterr().out
    listed, all_rows = map(_rows, (out, every))
    for rows in (listed, all_rows):
        assert [number for number, _ in rows] == [str(number) for number in range(1, len(rows) + 1)]
    layouts, all_layouts = ([layout for _, layout in rows] for rows in (listed, all_rows))
    assert set(layouts) < set(all_layouts)
    left_out = all_layouts.index(layouts[-1]) + 1 - len(layouts)
    assert f"Left out: {units.counted(left_out, 'layout')} at most 4% slower than " in " ".join(out.split())
    assert "Left out" not in every
    assert len({re.sub("recompute (none|selective)", "", layout) for layout in all_layouts}) == len(all_layouts)
    assert " equal a listed layout: their recompute changes neither time nor memory" in " ".join(every.split())
    assert "\nLearning rate: linear, 2e-05 to 0; 2,000 steps of warmup\n" in out
    assert main([*small, "--why", "1", "2"]) == 0
    assert f"2: {layouts[1]}\n" in capsys.readouterr().out, "--why takes the numbers of the rows"
    assert '"!": less than 10% of the device\'s memory is free.' in out
    assert max(map(len, out.splitlines())) <= 80
    (counts,) = re.findall(r"^Of ([\d,]+) layouts, these were dropped:\n((?: .*\n)+)", out, re.MULTILINE)
    dropped = sum(int(number.replace(",", "")) for number in re.findall(r"^ +([\d,]+)  ", counts[1], re.MULTILINE))
    assert dropped + len(all_layouts) == int(counts[0].replace(",", ""))
    assert re.search(rf" A step of layout {roomy}: matmul \d\d\.\d%, attention .*optimizer ", " ".join(out.split()))
    assert re.search(rf"^Fastest.*: layout {roomy} on 8 devices, ", out, re.MULTILINE), "as --write chooses"


def test_several_devices_stand_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cheap = tmp_path / "cheap.yaml"
    text = device_specs.shipped_text("h100").replace("NVIDIA H100 SXM\n", "Ours\n")
    cheap.write_text(f"{text}price_per_hour: 2 USD\n", encoding="utf-8")
    small = ["plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1"]
    devices = f"h100:8,{cheap}:8, a100-40gb:1"
    assert main([*small, "--device", devices]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(r"^devices +step +MFU +free +time +USD$", lines[0])
    assert lines[1].startswith("8 × NVIDIA H100 SXM")
    text = " ".join("\n".join(lines).split())
    ours = re.search(
        r"8 × Ours \(1 node × 8\) [\d.]+ s [\d.]+% !?[\d.]+ .iB \d+ \w [\d]+ \w+ ([\d,]+) TP .*? and ([\d,]+) to "
        r"([\d,]+) USD, " + re.escape(RANGE),
        text,
    )
    assert ours is not None
    price, least_price, most_price = (float(cell.replace(",", "")) for cell in ours.groups())
    assert (least_price / LEAST_RATIO, most_price / MOST_RATIO) == pytest.approx((price, price), rel=0.02)
    assert "a100-40gb:1: no layout fits " in text
    assert "Predictions for these devices probably err in the same direction: their order is surer" in text
    assert main([*small, "--device", devices, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["devices"]["h100:8"]["cost"] is None
    own = facts["devices"][f"{cheap}:8"]
    assert own["cost"] == pytest.approx(2 * own["device_hours"]) == pytest.approx(price, rel=0.01)
    assert list(facts["problems"]) == ["a100-40gb:1"]
    assert main([*small, "--device", "h100:8,b200:8", "--objective", "energy", "--json"]) == 0
    energy = [plan["kilowatt_hours"] for plan in json.loads(capsys.readouterr().out)["devices"].values()]
    assert energy == sorted(energy)


@pytest.mark.parametrize(("device", "stages"), [("trn2:64", 2), ("trn2:64", 1), ("h100:8", 2), ("trn2:64,h100:8", 2)])
def test_a_proposed_pipeline_on_trainium_is_warned_of(
    device: str, stages: int, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["plan", "llama2-7b", "train.global_batch=64", f"parallel.pipeline={stages}", "parallel.tensor=4"]
    assert main([*small, "--device", device]) == 0
    told = "\nparallel.pipeline (2) is refused by TorchNeuron's copy of" in capsys.readouterr().out
    assert told == (device.startswith("trn") and stages > 1)


@pytest.mark.parametrize(
    ("device", "shown"),
    [
        ("h200:8", "Accuracy: steps on one H200 were predicted within 3%; nine in ten published steps on A100"),
        ("a100:8", "Accuracy: nine in ten published steps on A100 to GB300 and Trainium1 were predicted within 14%"),
        (
            "trn1:32",
            "Accuracy: nine in ten of 39 published steps on AWS Trainium1 (a NeuronCore) were predicted within",
        ),
        ("trn2:64", "Accuracy: no published run on this device was compared;"),
        ("mi300x:8", "Accuracy: no published run on this device was compared;"),
        ("{file}:8", "Accuracy: no published run on this device was compared;"),
    ],
)
def test_the_accuracy_stands_below_the_list(
    device: str, shown: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("base: h100\nconstants: {node: 0.6}\n", encoding="utf-8")
    small = ["plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1", "parallel.tensor=2", "--nodes", "2"]
    assert main([*small, "--device", device.format(file=file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith("Accuracy: "))
    accuracy = lines[first:]
    proposed = re.search(r"^Fastest.*: (layout \d+) on ", "\n".join(lines), re.MULTILINE)
    assert proposed is not None
    assert (f": {proposed[1]} takes " in " ".join(accuracy)) == ("no published run" not in shown)
    assert shown in " ".join(accuracy)
    assert accuracy[-1].endswith("(docs/planner.md#how-far-off-it-is)")


def test_a_shipped_device_is_shown_as_a_file_that_describes_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", "--show-device", "a100"]) == 0
    file = tmp_path / "ours.yaml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert replace(device_specs.load_device(str(file)), key="a100-80gb") == device_specs.load_device("a100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h1000"], r"unknown device 'h1000': did you mean h100\? devices are "),
        (["--device", "h100:8,h100:8"], r"--device \(h100:8,h100:8\) must name .* each device once"),
        (["--device", "h100:8,b200:8", "--html", "page.html"], r"--html must be left out: --device \(h100:8,b200:8\)"),
        (["--device", "h100:8", "--show-device", "h100"], r"RECIPE must be left out: --show-device \(h100\)"),
        (["--device", "h100:8", "--why", "1", "99"], "must name two layouts of the list"),
        (["--device", "h100:8", "--budget", "1,2,, USD"], r"--budget \('1,2,, USD'\) must be a time .*, or a price"),
        (
            ["--device", "h100:8", "--budget", "1 day", "--failures", "10000", *FEW],
            r"--budget \(1 day\) must be longer",
        ),
        (
            ["--device", "h100:8", "--nodes", "4", "--failures", "10000", *FEW],
            r"--failures \(10000\) must be lower: on 32 × .* fails every 1 min 39 s, and the training does not finish",
        ),
        (
            ["--device", "mi300x:8", "precision.matmul=fp8", *FEW],
            r"precision\.matmul \(fp8\) must be left out on AMD .*, whose device file has no fp8_tflops: shardwise",
        ),
        (["--device", "h100:8", "--nodes", "2,x"], r"--nodes \(2,x\) must be a number of machines, or several"),
        (["--device", "h100:8", "--failures", "-1"], r"--failures \(-1\.0\) must be failures of a device in a year"),
        (["--device", "h100:8", "--restart", "soon"], r"--restart \('soon'\) must be a time in minutes, hours"),
        (
            ["--device", "trn1", "--nodes", "4", "--objective", "energy", *FEW],
            r"--objective \(energy\) must have the power of AWS Trainium1 .*: write a device file with base: trn1",
        ),
        (
            ["--device", "h100:8", "--budget", "100 EUR", "--price", "2 USD", *FEW],
            r"--budget \(100 EUR\) must go with a price in EUR of NVIDIA H100 SXM, which is in USD",
        ),
        (
            ["--device", "h100:8", "--budget", "100 USD", "--price", "2 USD", "train.global_batch=1", *FEW],
            r"--budget \(100 USD\) must be higher: the cheapest training found costs [\d,]+ USD on ",
        ),
        (["--device", "h100:8", "--nodes", "2", "--budget", "30 days"], "--budget must go without --nodes"),
        (
            ["--device", "a100-40gb:2", "parallel.tensor=2"],
            r"no layout fits 2 × NVIDIA A100 40GB SXM .*: the smallest \(.*--nodes 6 is",
        ),
        (
            ["--device", "a100-40gb:1", "parallel.pipeline=1", "optimizer.zero=1"],
            r"no layout fits .* of which 6% are reserved: choose a device with more memory",
        ),
        (["--device", "a100-40gb:7", "parallel.tensor=7"], r"no layout .* is valid on 7 devices: .*batch \(256\)"),
    ],
)
def test_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--nodes" not in arguments and "--budget" not in arguments:
        arguments = [*arguments, "--nodes", "1"]
    assert main(["plan", "gpt3-23b", "train.global_batch=256", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err, re.DOTALL)


def test_a_run_in_stages_is_written_with_the_micro_batch_of_each(tmp_path: Path) -> None:
    path = tmp_path / "planned.yaml"
    long = "sequence_length: 2048, global_batch: 8, micro_batch: 1"
    stages = f"data.stages=[{{at: 10, rope_theta: 1000.0}}, {{at: 18, {long}}}]"
    sizes = ("train.steps=20", "train.global_batch=256", "train.micro_batch=4", "model.max_position_embeddings=2048")
    machines = ("--device", "h100:8", "--nodes", "1", "parallel.tensor=1", "parallel.pipeline=1")
    assert main(["plan", "llama3-tiny", *machines, "--write", str(path), *sizes, stages]) == 0
    written = load_config(str(path))
    assert written.train.steps == 20
    assert check_layout(written, 8).data == 8
    trains = [stage.train for stage in stages_of(written)]
    assert [(train.sequence_length, train.global_batch) for train in trains] == [(64, 256), (64, 256), (2048, 8)]
    assert [train.micro_batch for train in trains] == [4, 4, 1]
    assert [stage.rope_theta for stage in written.data.stages] == [1000.0, None]
    longest = stages_of(load_config("llama3-tiny", [*sizes, stages]))[-1]
    planned = run_with_layout(longest, check_layout(longest, 8))
    assert "compile" not in planned.model_fields_set, "neither the recipe nor this layout sets it"


def test_offloaded_state_lets_a_large_model_fit_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama2-7b", "--device", "h100:1", "--nodes", "1", "train.global_batch=8"]
    assert main(command) == 2
    assert "no layout fits" in capsys.readouterr().err
    assert main([*command, "optimizer.offload=true"]) == 0


def test_budget_finds_the_fewest_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["plan", "llama2-7b", "--device", "h100:8", "train.global_batch=256", "parallel.pipeline=1"]
    assert main([*few, "--json", "--budget", "30 days"]) == 0
    facts = json.loads(capsys.readouterr().out)
    plan = facts["plans"][0]
    assert plan["days"] <= 30
    assert facts["budget"].endswith(f" it in 30 days, even if steps take {MOST_RATIO - 1:.0%} longer than predicted")
    close = f"{1.1 * plan['days']:.2f} days"
    assert main([*few, "--budget", close]) == 0
    late = (
        f"1 node of 8 trains it in {close}, as predicted; if steps take {MOST_RATIO - 1:.0%} longer than "
        "predicted, 2 nodes are needed"
    )
    assert late in " ".join(capsys.readouterr().out.split())
    # The numbers that are tried first are 4 and 6.
    whole = ["plan", "llama2-7b", "--device", "h100:8", "--json", "train.global_batch=240", "parallel.pipeline=1"]
    assert main([*whole, "--nodes", "5"]) == 0
    on_five = json.loads(capsys.readouterr().out)["plans"][0]["days"]
    assert main([*whole, "--budget", f"{1.001 * on_five:.6f} days"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"].startswith("5 nodes of 8 train it in ")


@pytest.mark.parametrize(
    ("device", "keys", "shortest"),
    [
        ("cpu:1", ["train.global_batch=1", "train.micro_batch=1"], r"\d+(\.\d)? m?s on 1 × A core"),
        ("a100-40gb:1", ["model.vocab_size=2000000000", "train.global_batch=1"], "nothing fits"),
    ],
)
def test_a_budget_that_no_cluster_keeps_is_refused(
    device: str, keys: list[str], shortest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ["parallel.tensor=1", "parallel.pipeline=1", "train.recompute=none"]
    assert main(["plan", "llama2-tiny", "--device", device, "--budget", "0.00001 hours", *alone, *keys]) == 2
    message = rf"--budget \(0\.00001 hours\) must be longer: the shortest training found takes {shortest}"
    assert re.search(message, capsys.readouterr().err)


def test_a_dry_run_for_a_cluster_tells_whether_it_fits_and_how_long_checkpoints_are_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["train", "llama2-7b", "--dry-run", "--device", "h100:8", "parallel.pipeline=1", "checkpoint.every=1000"]
    code = f"import sys; from shardwise.cli.entry import main; main({command}); assert 'torch' not in sys.modules"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "8 × NVIDIA H100 SXM (1 node × 8)" in text
    assert re.search(r"^#   memory +[\d.]+ GiB free beside a reserve of 6% of the device's 74\.5 GiB \(", text, re.M)
    seconds = re.search(r"^# step +([\d.]+) s predicted", text, re.M)
    every = re.search(
        r"^# checkpoints +every 1,000 steps \(about (\d) h (\d+) min\), every 30 minutes and ", text, re.M
    )
    assert seconds is not None
    assert every is not None
    assert 60 * int(every[1]) + int(every[2]) == pytest.approx(1000 / 60 * float(seconds[1]), rel=0.02)
    assert main([*command, "parallel.tensor=1", "train.micro_batch=8", "launch.nodes=2"]) == 2
    shown = capsys.readouterr()
    assert "16 × NVIDIA H100 SXM (2 nodes × 8)" in shown.out
    assert re.search(r"^#   memory +does not fit: \d+ GiB are needed beside a reserve of 6% ", shown.out, re.M)
    assert re.search(
        r"on each rank \(\d+ GiB\) must be at most that of NVIDIA H100 SXM \(74\.5 GiB\): raise", shown.err
    )
    assert main([*command, "launch.nodes=2", "--nodes", "1", "--nproc", "8"]) == 2
    assert "without --nproc, --nodes gives the machines" in capsys.readouterr().err


def test_several_numbers_of_nodes_are_compared_by_the_objective(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "gpt3-23b", "--device", "h100:8", "--nodes", "4,8", "train.global_batch=256", *FEW]
    by_objective = {}
    for objective in ("time", "cost"):
        assert main([*command, "--price", "2 USD", "--objective", objective, "--json"]) == 0
        by_objective[objective] = json.loads(capsys.readouterr().out)
    for objective, key in (("time", "days"), ("cost", "cost")):
        values = [plan[key] for plan in by_objective[objective]["plans"]]
        assert values == sorted(values)
    plans = by_objective["time"]["plans"]
    assert {plan["nodes"] for plan in plans} == {4, 8}
    assert plans[0]["nodes"] == 8
    assert by_objective["cost"]["plans"][0]["nodes"] == 4
    proposed = by_objective["time"]["proposals"]
    named = {name: plans[proposal["layout"] - 1] for proposal in proposed for name in proposal["names"]}
    assert set(named) == {"fastest", "cheapest", "most robust"}
    assert named["fastest"]["days"] == min(plan["days"] for plan in plans)
    assert named["cheapest"]["device_hours"] == min(plan["device_hours"] for plan in plans)
    for proposal in proposed:
        seconds = 86_400 * plans[proposal["layout"] - 1]["days"]
        changed = list(proposal["sensitivity_seconds"].values())
        assert all(seconds < other < changed[-1] for other in changed[:3])


def test_a_budget_in_money_finds_the_fastest_cluster_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    """No layout fits 12 nodes or 24, as three times a power of two does not divide the batch."""
    few = [*FEW, "parallel.pipeline=2", "train.global_batch=32"]
    command = ["plan", "gpt3-23b", "--device", "h100:8", "--price", "2 USD", *few, "--json"]
    assert main([*command, "--nodes", "32"]) == 0
    cost = json.loads(capsys.readouterr().out)["plans"][0]["cost"]
    assert main([*command, "--budget", f"{cost + 1:,.0f} USD"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plans"][0]["nodes"] == 32
    assert re.match(r"32 nodes train it for [\d,]+ USD in \d+ d \d\d h$", facts["budget"])


@pytest.mark.parametrize(
    ("recipe", "nodes"),
    [
        ("gpt3-23b", 10),  # 8 cost less, 9 and 12 cost more
        ("gpt3-175b", 9),  # 6, 8 and 12 cost more, by layouts that leave memory free
    ],
)
def test_numbers_of_nodes_between_those_tried_first_keep_to_a_price(
    recipe: str, nodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", recipe, "--device", "h100:8", "--price", "2 USD", "train.global_batch=60", *FEW, "--json"]
    assert main([*command, "--nodes", str(nodes)]) == 0
    facts = json.loads(capsys.readouterr().out)
    cost = facts["plans"][facts["recommended"] - 1]["cost"]
    assert main([*command, "--budget", f"{cost + 1:,.0f} USD"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"].startswith(f"{nodes} nodes train it for ")


def test_compared_clusters_train_the_same_tokens_where_the_batch_grows_with_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = tmp_path / "best.yaml"
    command = ["plan", "gpt3-175b", "--device", "h100:8", "--price", "2 USD", *FEW]
    # The recipe's rule is 256 sequences for 256 ranks, which are 32 nodes.
    assert main([*command, "--nodes", "32,64", "--json", "--write", str(written)]) == 0
    facts = json.loads(capsys.readouterr().out)
    plans = facts["plans"]
    steps = {plan["nodes"]: plan["steps"] for plan in plans}
    assert steps == {32: 300_000, 64: 150_000}
    assert {plan["tokens"] for plan in plans} == {300_000 * 256 * 2048}
    assert facts["steps"].endswith(" for 157 billion tokens in all: 300,000 steps on 256 devices, 150,000 on 512")
    best = load_config(str(written)).with_batch_for(512)
    assert (best.train.steps, best.train.global_batch, best.optimizer.constant_steps) == (150_000, 512, 40_000)
    cheapest = min(plans, key=lambda plan: plan["cost"])
    assert main([*command, "--budget", f"{1.001 * cheapest['cost']:.0f} USD", "--json"]) == 0
    for plan in json.loads(capsys.readouterr().out)["plans"]:
        step_tokens = plan["tokens"] / plan["steps"]
        assert abs(plan["tokens"] - 300_000 * 256 * 2048) <= step_tokens / 2, "the nearest whole number of steps"
    # What a cluster trains by the recipe itself is not changed.
    assert main([*command, "--nodes", "64", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["steps"] is None
    assert facts["plans"][0]["steps"] == 300_000
    assert main([*command, "--nodes", "64", "--device", "h100:8,h200:4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "300,000 steps on 256 devices, 150,000 on 512" in " ".join(lines)
    assert max(map(len, lines)) <= 80


def test_devices_of_a_node_that_do_not_divide_the_batch_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "gpt3-23b", "--nodes", "1", "parallel.tensor=1", "train.micro_batch=1", "parallel.schedule=1f1b"]
    assert main([*command, "--device", "gb200", "--json", "train.global_batch=256"]) == 0
    facts = json.loads(capsys.readouterr().out)
    whole = facts["plans"][0]["device_hours"]
    fewer = re.match(
        r"The 72 devices of a node do not divide the batch of 256: with 64 of each \(--device gb200:64\) the training "
        r"takes ([\d,]+) device-hours in place of ([\d,]+), ",
        facts["unused"],
    )
    assert fewer is not None
    assert int(fewer[1].replace(",", "")) < int(fewer[2].replace(",", "")) == round(whole)
    assert main([*command, "--device", "gb200", "--json", "train.global_batch=288"]) == 0
    assert json.loads(capsys.readouterr().out)["unused"] is None


def test_the_days_are_those_of_the_calendar(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["plan", "gpt3-23b", "--device", "h100:8", "--nodes", "4", "train.global_batch=256", *FEW]
    assert main([*command, "checkpoint.every_minutes=60", "--failures", "0", "--json"]) == 0
    without = json.loads(capsys.readouterr().out)["plans"][0]
    assert main([*command, "checkpoint.every_minutes=60", "--failures", "20", "--restart", "1 hour"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "checkpoints every 1 h 00 min (as the recipe says; every " in text
    assert "Assumed are 20 failures for each device and year, 1 h 00 min for a restart," in text
    ((days, hours),) = re.findall(r" 1 TP .*?iB (\d+) d (\d+) h 1f1b", text)
    assert int(days) + int(hours) / 24 > 1.05 * without["days"]


def test_the_page_stands_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    command = ["plan", "gpt3-23b", "--device", "h100:8", "--nodes", "4", "train.global_batch=256", *FEW]
    assert main([*command, "--price", "2 USD", "--html", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    page = file.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:)", page), "it needs no network"
    assert page.count('<svg class="timeline"') == 1
    best = facts["plans"][0]
    assert page.count(">rank ") == best["layout"]["pipeline"]
    assert f"<td>{units.duration(86_400 * best['days'])}</td>" in page
    assert "the network has 30% less bandwidth" in page
    assert "activations" in page
    assert main([*command, "--html", str(file)]) == 2
    assert "--html" in capsys.readouterr().err


def test_a_batch_that_no_layout_divides_is_told_with_what_it_must_be(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["train.global_batch=6", "train.micro_batch=1", "parallel.tensor=1", "parallel.pipeline=1"]
    assert main(["plan", "llama2-tiny", "--device", "h100:8", *keys]) == 2
    assert re.search(
        r"no layout of the recipe is valid on 8 devices: .*; in its own layout, train\.global_batch \(6\) must be a "
        r"multiple of train\.micro_batch × data-parallel degree \(1 × 8 = 8\): nearest 8",
        capsys.readouterr().err,
    )
