"""The notebook in examples/, executed as Jupyter executes it; and what a cell shows while a run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.views import in_notebook
from rlsdk.views.notebook import NotebookView

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
EVIL = "<script>alert(1)</script>\x1b[2J"


def test_the_notebook_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward defined in a cell, rows, a chart in the cell, two more runs in the same kernel."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute(env=dict(os.environ))
    cells = {cell["id"]: outputs(cell) for cell in notebook.cells if cell["cell_type"] == "code"}
    trained = cells[cell_with(notebook, "run = rlsdk.train")]
    assert "step 8/8" in trained
    assert "ended" in trained
    assert trained.count("<svg") >= 2  # the chart while it ran, and the run's own
    planned = next(cell for cell in notebook.cells if "rlsdk.plan(" in cell["source"])
    (output,) = planned["outputs"]
    assert output["data"]["text/html"].count("<table>") > 3
    assert "fits: at most" in output["data"]["text/plain"]
    assert "<th>reward, in training</th>" in trained
    assert "accuracy_se" not in trained
    assert "(10, 'step_00000010')" in cells[cell_with(notebook, "run.resume")]
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "end.json").read_text())["state"] == "finished"
    steps = [row for row in rlsdk.Run(folder).metrics if "time/step_s" in row]
    assert len(steps) == 10
    assert all(0 <= row[f"throughput/{what}_share"] <= 1 for row in steps for what in ("cpu", "memory"))
    noise = [text for text in cells.values() if "ipywidgets" in text]
    assert not noise, "libraries that rlsdk imports ask for packages that it does not need"
    assert cells[cell_with(notebook, "run.generate")].count("3 + 4 =") in (3, 6)  # as text, and as a table


def cell_with(notebook: Any, text: str) -> str:
    return next(str(cell["id"]) for cell in notebook.cells if cell["cell_type"] == "code" and text in cell["source"])


def outputs(cell: Mapping[str, Any]) -> str:
    """All that a cell shows, as text."""
    found = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        found += [
            str(output.get("text", "")),
            *(str(data.get(kind, "")) for kind in ("text/html", "image/svg+xml", "text/plain")),
        ]
    return "\n".join(found)


def test_nothing_that_others_wrote_is_executed_in_a_cell() -> None:
    view = NotebookView()
    view.notice(EVIL)
    view.step(3, 10, {"reward/mean": 0.5})
    page = view.page()
    assert "<script>" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;" in page
    assert "step 3/10" in page
    assert "reward <b>0.5</b>" in page


def test_a_program_that_is_no_kernel_has_no_notebook() -> None:
    assert not in_notebook()
