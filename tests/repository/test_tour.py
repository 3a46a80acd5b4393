"""examples/tour.ipynb runs from top to bottom, and the outputs that are committed with it are those of its cells."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_tour_runs(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for cell in CODE:
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, {cell['id']}", "exec"), namespace)
    matplotlib.pyplot.close("all")


def test_it_was_run_in_order_and_without_an_error():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_it_is_small_and_says_nothing_of_the_machine_it_ran_on():
    text = NOTEBOOK.read_text("utf-8")
    assert len(text) < 300_000
    assert "/tmp/" not in text and "/home/" not in text and "/work/" not in text
