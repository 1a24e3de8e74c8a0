"""Make the pictures of docs/watching.md from real runs: `llama-small` at DP 2 on two CPU ranks, which mostly compute.

The report of several runs is of four of `llama2-tiny`, each in one process.

    .venv/bin/python -m scripts.watching_pictures [--run DIR] [--top]

It needs Chromium. `--run` takes a run that is there, instead of training one; `--top` makes the screen of `top` alone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from shardwise_watch.screen.app import TopScreen
from shardwise_watch.screen.frame import FrameReader

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
RECIPE = "llama-small"
KEYS = [
    *("parallel.tensor=1", "parallel.sequence=false", "train.global_batch=64", "train.steps=60", "train.eval_every=15"),
    *("optimizer.warmup_steps=6", "checkpoint.every=20", "log.every=1"),
]
"""Eight micro-batches a step on each rank: gradients are sent once, so that little of a step is communication."""
SIZE = (120, 30)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")
SHOWN = "train%2F(loss%7Clr%7Cgrad_norm%7Ctokens_per_second)%24"
"""The curves that TensorBoard shows: a regular expression of their names, as a URL has it."""


def train(folder: Path) -> Path:
    """Train the run; returns its folder."""
    command = [sys.executable, "-m", "shardwise", "train", RECIPE, *KEYS, "--nproc", "2"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--run-dir", f"runs/{RECIPE}"], cwd=folder, env=variables, check=True)
    return folder / "runs" / RECIPE


SEVERAL = {
    "base": ["train.steps=80"],
    "lr-low": ["train.steps=80", "optimizer.lr=4e-4"],
    "batch-x2": ["train.steps=40", "train.global_batch=16"],
    "warmup": ["train.steps=80", "optimizer.warmup_steps=20"],
}
"""Keys of the runs that are compared."""
CHOSEN = """<script>{
const form = document.querySelector(".controls");
form.x.value = "tokens";
form.smoothing.value = 0.5;
form.dispatchEvent(new Event("input"));
}</script></body>"""
"""What a reader of the page chooses there."""


def several(folder: Path) -> Path:
    """Train some runs; returns the report that compares them, by tokens and smoothed."""
    program = [sys.executable, "-m", "shardwise"]
    shared = ["train.eval_every=20", "checkpoint.every=0", "log.sample_tokens=0", "log.every=1", "--nproc", "1"]
    for name, keys in SEVERAL.items():
        command = [*program, "train", "llama2-tiny", *keys, *shared, "--run-dir", f"runs/{name}"]
        subprocess.run(command, cwd=folder, check=True)
    page = folder / "several.html"
    runs = [f"runs/{name}" for name in SEVERAL]
    subprocess.run([*program, "report", *runs, "--output", str(page)], cwd=folder, check=True)
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", CHOSEN), encoding="utf-8")
    return page


async def screen(run: Path) -> str:
    """The screen of `top` as SVG."""
    app = TopScreen(FrameReader(run).read, 0.2)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(4)
        return app.export_screenshot(title="shardwise top")


async def photograph(url: str, file: Path, width: int, height: int, seconds: float) -> None:
    """A picture of a page as PNG, `seconds` after it was opened: TensorBoard draws long after a page has loaded."""
    port = free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        sizes = (f"--remote-debugging-port={port}", f"--user-data-dir={profile}", f"--window-size={width},{height}")
        browser = subprocess.Popen([BROWSER, *OPTIONS, *sizes, url], stderr=subprocess.DEVNULL)
        try:
            async with aiohttp.ClientSession() as session:
                await asyncio.sleep(seconds)
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    pages = [page for page in await answer.json() if page["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket_:
                    await socket_.send_json({"id": 1, "method": "Page.captureScreenshot"})
                    answered = await socket_.receive_json()
            file.write_bytes(base64.b64decode(answered["result"]["data"]))
        finally:
            browser.terminate()
            browser.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tensorboard(run: Path, file: Path) -> None:
    """A picture of the run's curves in TensorBoard."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(run / "tensorboard"), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(8)
        url = f"http://127.0.0.1:{port}/?darkMode=false&tagFilter={SHOWN}#timeseries"
        asyncio.run(photograph(url, file, 1280, 760, 15))
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, help="a run that is there")
    parser.add_argument("--top", action="store_true", help="the screen of `top` alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = arguments.run or train(Path(temporary))
        (IMAGES / "top.svg").write_text(asyncio.run(screen(run)), encoding="utf-8")
        if arguments.top:
            return
        page = Path(temporary) / "report.html"
        command = [sys.executable, "-m", "shardwise", "report", str(run), "--output", str(page)]
        subprocess.run(command, check=True)
        asyncio.run(photograph(f"file://{page}", IMAGES / "report.png", 1280, 1760, 4))
        of_runs = several(Path(temporary))
        asyncio.run(photograph(f"file://{of_runs}", IMAGES / "report-of-runs.png", 1280, 1000, 4))
        tensorboard(run, IMAGES / "tensorboard.png")


if __name__ == "__main__":
    main()
