"""The notebooks run from top to bottom, print what they promise, and draw."""

import os
import pathlib
import re

import nbclient
import nbformat
import pytest

from marl_llm.training.mesh import quick_flags

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"


# a training of a minute is run for two steps here: what it learns is no part of the test
SHORTER = {"04_your_own_team": (r"WARM, STEPS, ORDERS_PER_STEP = \d+, \d+, \d+", "WARM, STEPS, ORDERS_PER_STEP = 2, 2, 2")}


@pytest.mark.parametrize(("name", "pictures", "said"), [
    ("01_groups_and_advantages", 4, "mix prompts"),
    ("02_losses", 6, "on the sampler's kept set"),
    ("03_models_and_sharding", 2, "does not fit"),
    ("04_your_own_team", 1, "of the plate right before"),
    ("05_joint_returns", 2, "one joint reward: utility 9.9"),
    ("06_a_coach", 1, "of the dawdling one +1.80"),
])  # fmt: skip
def test_notebook_runs(name, pictures, said, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", " ".join(quick_flags()))  # a notebook chooses its number of devices itself
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    text = (NOTEBOOKS / f"{name}.ipynb").read_text()
    if name in SHORTER:
        text, count = re.subn(*SHORTER[name], text)
        assert count == 1
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    nbclient.NotebookClient(notebook, timeout=600, startup_timeout=600, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures
    assert any(said in output.get("text", "") for output in outputs)


def test_every_notebook_is_stored_with_its_outputs():
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert all(cell.execution_count for cell in cells), path.name
        assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs), path.name
        assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"], path.name
