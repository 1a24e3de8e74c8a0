"""The example notebook, run by a kernel of Jupyter: what its cells show, and what the run records."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source import ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.slow
STEPS = 6


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def outputs(at: Path) -> list[Any]:
    """The outputs of the cell that trains."""
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(at / "cache"))
        patch.setenv("IPYTHONDIR", str(at / "ipython"))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        client = nbclient.NotebookClient(
            notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(at)}}
        )
        client.execute()
    (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and "shardwise.train(" in cell.source)
    return list(cell.outputs)


def stdout(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


def test_progress_is_one_display_and_each_message_is_shown_once(outputs: list[Any], at: Path) -> None:
    (display,) = (output for output in outputs if output.output_type == "display_data")
    page = display.data["text/html"]
    assert f'<b>step {STEPS}/{STEPS}</b>\n<progress value="{STEPS}" max="{STEPS}"' in page
    assert "done" in page
    assert "tokens/s" in page
    assert f"step {STEPS}/{STEPS}" in display.data["text/plain"]
    shown = stdout(outputs)
    assert "\x1b" not in str(outputs)
    assert "ipywidgets" not in str(outputs)
    lines = Counter(line for line in shown.splitlines() if line)
    assert set(lines.values()) == {1}, lines.most_common(3)
    (message,) = (line for line in lines if line.startswith(f"evaluation at step {STEPS}:"))
    log = (at / "runs/latest/logs/rank-0000.log").read_text(encoding="utf-8")
    assert log.splitlines().count(message) == 1
