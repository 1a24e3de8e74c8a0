"""`shardwise plan`: the list, what is kept, what is written, and what is refused."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.entry import main
from shardwise.config import check_layout, load_config
from shardwise.planner import device_specs
from shardwise.planner.device_specs import cluster
from shardwise.planner.memory import expected_memory
from shardwise.planner.search import search

_REPLACED = "train it with (replace YOUR_… by the paths of your data)"
GPT = ["gpt3-23b", "--device", "h100:8", "--nodes", "4", "train.global_batch=256"]


def test_best_layouts_first_and_each_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "best.yaml"
    assert main(["plan", *GPT, "train.micro_batch=1", "--json", "--write", str(written)]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    seconds = [plan["step_seconds"] for plan in plans]
    assert 5 <= len(plans) <= 10
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
    assert re.search(r" with layout 3, predicted to take [\d.]+ to [\d.]+ days; train it with ", err)
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
    second = tmp_path / "second.yaml"
    others = ["data.dataset=tiny", "optimizer.lr=3e-4"]
    assert main(["plan", str(first), *fixed, *others, "--write", str(second)]) == 0
    assert capsys.readouterr().err.endswith(f"train it with: shardwise train {second}\n")
    assert second.read_text(encoding="utf-8").count("#") == 1


def test_pruning_loses_no_layout() -> None:
    """The best of all by brute force: every layout simulated, without bounds."""
    from shardwise.planner.search import choices, compiled
    from shardwise.planner.step_time import least_time, step_time

    config = load_config("gpt3-23b", ["train.global_batch=32"])
    on = cluster("h100:8", 2)
    found = search(config, on, best=1000, fixed=("train.micro_batch",))
    times = {}
    valid = 0
    fixed = ("train.micro_batch",)
    for lists, layout in choices(config, on.world, on.per_node, fixed):
        valid += len(lists)
        for choice in (choice for shardings in lists for choice in shardings):
            chosen = compiled(choice.applied(config), on.device)
            time = step_time(chosen, layout, on)
            assert time is not None
            assert time.total >= least_time(chosen, layout, on) * (1 - 1e-9)
            times[choice] = time.total
    assert valid == found.valid
    listed = [plan.time.total for plan in found.plans]
    assert listed == sorted(listed)
    assert len(found.plans) + sum(found.too_large.values()) == found.valid
    for plan in found.plans:
        least = times[replace(plan.choice, regathers=False)]
        # Gathers that no matmul hides take time.
        assert least <= plan.time.total
        assert least == plan.time.total or plan.choice.regathers


def test_given_keys_are_kept_and_two_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    kept = ["parallel.tensor=4", "train.recompute=full", "parallel.schedule=1f1b"]
    assert main(["plan", *GPT, *kept, "--why", "1", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("TP 4") == 2
    assert text.count("recompute full") == 2
    assert "difference" in text


def test_layouts_that_differ_in_details_are_left_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "llama2-7b", "--device", "h100:8", "parallel.pipeline=1", "train.global_batch=64"]
    assert main(small) == 0
    out = capsys.readouterr().out
    assert main([*small, "--all"]) == 0
    every = capsys.readouterr().out
    listed, all_rows = (re.findall(r"^ *(\d+)  (TP .*?)  ", text, re.MULTILINE) for text in (out, every))
    for rows in (listed, all_rows):
        assert [number for number, _ in rows] == [str(number) for number in range(1, len(rows) + 1)]
    layouts, all_layouts = ([layout for _, layout in rows] for rows in (listed, all_rows))
    assert set(layouts) < set(all_layouts)
    left_out = all_layouts.index(layouts[-1]) + 1 - len(layouts)
    assert re.search(
        rf"^Listed are the {len(layouts)} fastest\. Left out: {left_out} layouts? at most 4% slower than ",
        out,
        re.MULTILINE,
    )
    assert "Left out" not in every
    assert main([*small, "--why", "1", "2"]) == 0
    assert f"2: {layouts[1]}\n" in capsys.readouterr().out, "--why takes the numbers of the rows"
    assert "  hours  " in out, "the training takes less than ten days"
    assert re.search(r"^ *1  TP .*\(tight\) [\d.]+ GiB", out, re.MULTILINE)
    assert "(tight): less than 10% of the device's memory is free." in out
    assert ("ZeRO-2 and ZeRO-3: published runs with them took about 15%" in out) == ("ZeRO-2" in "".join(layouts))
    assert re.search(r"^A step of layout 1: matmul \d\d\.\d%, attention .*accumulation .*optimizer ", out, re.MULTILINE)


def test_several_devices_stand_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cheap = tmp_path / "cheap.yaml"
    text = (Path(device_specs.__file__).parent / "devices/h200.yaml").read_text(encoding="utf-8")
    cheap.write_text(f"{text}\ndollars_per_hour: 2\n", encoding="utf-8")
    small = ["plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1"]
    devices = f"h100:8,{cheap}:8, a100-40gb:1"
    assert main([*small, "--device", devices]) == 0
    head, h100, h200, problem, *accuracy = capsys.readouterr().out.splitlines()
    assert re.search(r" free +hours +-15% to \+20% +device-hours +dollars +-15% to \+20%$", head)
    assert h100.startswith("8 × NVIDIA H100 SXM")
    hours, dollars, least_dollars, _, most_dollars = h200.replace(",", "").split()[-5:]
    assert int(dollars) == pytest.approx(2 * int(hours), abs=2)
    assert (int(least_dollars) * 1.17, int(most_dollars) * 0.83) == pytest.approx((int(dollars),) * 2, abs=2)
    assert problem.startswith("a100-40gb:1: no layout fits ")
    assert accuracy[1] == "(tight): less than 10% of the device's memory is free."
    assert accuracy[2].startswith("ZeRO-2 and ZeRO-3: published runs with them took about 15%")
    assert accuracy[3].startswith("Accuracy: steps on one H200 were predicted within 3%;")
    time, least, most = (float(number) for number in re.findall(r"([\d.]+)  +([\d.]+) to ([\d.]+)  ", h100)[0])
    assert (least * 1.17, most * 0.83) == pytest.approx((time, time), rel=0.02)
    assert accuracy[-1].startswith("Predictions for these devices probably err in the same direction")
    assert main([*small, "--device", devices, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["devices"]["h100:8"]["dollars"] is None
    assert facts["devices"]["h100:8"]["accuracy"].startswith("steps on one H200 were predicted within 3%")
    assert facts["devices"][f"{cheap}:8"]["layout"]["tensor"] >= 1
    assert list(facts["problems"]) == ["a100-40gb:1"]
    for option in (["--why", "1", "2"], ["--all"]):
        assert main([*small, "--device", devices, *option]) == 2
        assert f"{option[0]} must go with one device" in capsys.readouterr().err


def test_a_price_for_each_device_or_one_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1", "--device", "h100:8,b200:8"]
    for price, each in (("2.50,5.00", [2.5, 5.0]), ("4", [4.0, 4.0])):
        assert main([*small, "--price", price, "--json"]) == 0
        plans = json.loads(capsys.readouterr().out)["devices"].values()
        assert [plan["dollars"] / plan["device_hours"] for plan in plans] == pytest.approx(each)
    assert main([*small, "--price", "2.50,5.00"]) == 0
    head, h100, b200 = capsys.readouterr().out.splitlines()[:3]
    assert re.search(r" device-hours +dollars +-15% to \+20%$", head)
    for row, price_of_hour in ((h100, 2.5), (b200, 5)):
        hours, dollars = (float(cell.replace(",", "")) for cell in row.split()[-5:-3])
        assert dollars == pytest.approx(price_of_hour * hours, abs=price_of_hour)


def test_a_price_of_one_device_adds_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1", "--device", "h100:8"]
    assert main(small) == 0
    assert "dollars" not in capsys.readouterr().out
    assert main([*small, "train.steps=1000000", "--price", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"device-hours +dollars$", out, re.MULTILINE)
    assert '"device-hours", "dollars" = all steps, without evaluations, checkpoints and restarts' in out
    (dollars,) = re.findall(r"^ *1  .* ([\d,.]+)$", out, re.MULTILINE)
    low, high = re.findall(r"([\d,]+) to ([\d,]+) dollars", out.replace("\n", " "))[0]
    price, least, most = (float(number.replace(",", "")) for number in (dollars, low, high))
    assert (least * 1.17, most * 0.83) == pytest.approx((price, price), rel=1e-3)


@pytest.mark.parametrize(
    ("price", "message"),
    [
        (
            "1,2,3",
            r"--price \(1,2,3\) must be one number, or one for each of the 2 devices of --device \(h100:8,b200:8\)",
        ),
        ("2.50,", r"--price \(2.50,\) must be dollars for a device and an hour, from 0 to 10,000"),
        ("-1", r"--price \(-1\) must be dollars"),
        ("nan", r"--price \(nan\) must be dollars"),
    ],
)
def test_other_prices_are_refused(price: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama2-7b", "--device", "h100:8,b200:8", f"--price={price}"]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("device", "shown"),
    [
        ("h100:8", "Accuracy: steps on one H200 were predicted within 3%;"),
        ("a100:8", "Accuracy: nine in ten published steps on A100 to GB300 and Trainium1 were predicted within 17%"),
        ("b200:8", "Accuracy: nine in ten published steps on A100 to GB300 and Trainium1 were predicted within 17%"),
        ("{file}:8", "constants are those of the file"),
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
    assert (": layout 1 takes " in " ".join(accuracy)) != device.startswith("{")
    assert shown in " ".join(accuracy)
    assert accuracy[-1].endswith("(docs/planner.md#how-far-off-it-is)")
    assert len(accuracy) <= 3
    assert max(map(len, accuracy)) <= 80


def test_a_shipped_device_is_shown_as_a_file_that_describes_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", "--show-device", "a100"]) == 0
    file = tmp_path / "ours.yaml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert replace(device_specs.load_device(str(file)), key="a100-80gb") == device_specs.load_device("a100")
    assert main(["plan", "--show-device", "h1000"]) == 2
    assert "did you mean h100?" in capsys.readouterr().err
    assert main(["plan", "llama2-7b", "--show-device", "h100"]) == 2
    assert "--show-device (h100) must go alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h1000"], r"unknown device 'h1000': did you mean h100\? devices are "),
        (["--device", "h100:8,h100:8"], r"--device \(h100:8,h100:8\) must name each device once"),
        (["--device", "h100x8"], r"did you mean h100:8\?"),
        (["--device", "8xa100"], r"did you mean a100-80gb:8\?|did you mean a100:8\?"),
        (["--device", "h100", "--nodes", "0"], "at least one device"),
        (["--device", "h100:8", "--why", "1", "99"], "must name two layouts of the list"),
        (["--device", "h100:8", "--budget", "soon"], "must be a time in hours, days or weeks"),
        (
            ["--device", "h100:8", "--nodes", "2", "--budget", "30 days"],
            "--budget must go without --nodes: it answers how many nodes are needed",
        ),
        (
            ["--device", "a100-40gb:2", "parallel.tensor=2"],
            r"no layout fits 2 × NVIDIA A100 40GB SXM .*: the smallest \(.*--nodes 6 is",
        ),
        (
            ["--device", "a100-40gb:1", "parallel.pipeline=1", "optimizer.zero=1"],
            r"no layout fits .* needs at least .* on a device of .*, of which 6% are reserved: choose a device with "
            r"more memory",
        ),
        (
            ["--device", "a100-40gb:8", "parallel.tensor=16"],
            "no layout of the recipe is valid on 8 devices",
        ),
        (
            ["--device", "a100-40gb:7", "parallel.tensor=7"],
            r"no layout of the recipe is valid on 7 devices: train\.global_batch \(256\) or the model's sizes have no "
            r"divisor that suits",
        ),
    ],
)
def test_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--nodes" not in arguments and "--budget" not in arguments:
        arguments = [*arguments, "--nodes", "1"]
    assert main(["plan", "gpt3-23b", "train.global_batch=256", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err, re.DOTALL)


def test_offloaded_state_lets_a_large_model_fit_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama2-7b", "--device", "h100:1", "--nodes", "1", "train.global_batch=8"]
    assert main(command) == 2
    assert "no layout fits" in capsys.readouterr().err
    assert main([*command, "optimizer.offload=true"]) == 0


def test_budget_finds_the_fewest_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    days = ["--device", "h100:8", "--json", "train.global_batch=256"]
    assert main(["plan", "llama2-7b", *days, "--budget", "30 days"]) == 0
    shown = capsys.readouterr()
    plan = json.loads(shown.out)["plans"][0]
    assert plan["days"] <= 30
    assert " it in 30 days, even if steps take 20% longer than predicted\n" in shown.err
    close = f"{1.1 * plan['days']:.2f} days"
    assert main(["plan", "llama2-7b", *days, "parallel.pipeline=1", "--budget", close]) == 0
    late = (
        f"1 node of 8 trains it in {close}, as predicted; if steps take 20% longer than predicted, 2 nodes are needed\n"
    )
    assert late in capsys.readouterr().err
    # The numbers that are tried first are 4 and 6.
    whole = ["plan", "llama2-7b", "--device", "h100:8", "--json", "train.global_batch=240", "parallel.pipeline=1"]
    assert main([*whole, "--nodes", "5"]) == 0
    on_five = json.loads(capsys.readouterr().out)["plans"][0]["days"]
    assert main([*whole, "--budget", f"{1.001 * on_five:.6f} days"]) == 0
    assert capsys.readouterr().err.startswith("5 nodes of 8 train it in ")


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


def test_dry_run_for_a_cluster_tells_its_device_and_imports_no_torch() -> None:
    code = (
        "import sys; from shardwise.cli.entry import main; "
        "main(['train', 'gpt3-23b', '--dry-run', '--device', 'h100:8', '--nodes', '4']); "
        "assert 'torch' not in sys.modules"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "32 × NVIDIA H100 SXM (4 nodes × 8)" in text
    assert "(cpu)" not in text
    assert "parameters bfloat16" in text
    assert "predicted" in text


def test_a_dry_run_for_a_cluster_tells_whether_it_fits_and_how_long_checkpoints_are_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["train", "llama2-7b", "--dry-run", "--device", "h100:8", "parallel.pipeline=1", "checkpoint.every=1000"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert re.search(r"^#   memory +[\d.]+ GiB free beside a reserve of 6% of the device's 74\.5 GiB \(", text, re.M)
    seconds = re.search(r"^# step +([\d.]+) s predicted", text, re.M)
    every = re.search(
        r"^# checkpoints +every 1,000 steps \(about (\d) h (\d+) min\), every 30 minutes and ", text, re.M
    )
    assert seconds is not None
    assert every is not None
    assert 60 * int(every[1]) + int(every[2]) == pytest.approx(1000 / 60 * float(seconds[1]), rel=0.02)
    assert main([*command, "parallel.tensor=1", "train.micro_batch=8"]) == 0
    assert re.search(
        r"^#   memory +does not fit: \d+ GiB are needed beside a reserve of 6% ", capsys.readouterr().out, re.M
    )


def test_submission_tells_the_step_on_the_nodes_devices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["data.dataset=python", "train.global_batch=512"]
    assert main(["submit", "gpt2", "--dry-run", "--nodes", "2", "--device", "h100:8", *small]) == 0
    text = capsys.readouterr().out
    assert "16 × NVIDIA H100 SXM (2 nodes × 8)" in text
    assert "DP 16 = 16 ranks" in text
    assert "predicted" in text
