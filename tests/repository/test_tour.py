"""The notebooks of examples/ run from top to bottom, and the outputs that are committed with them fit."""

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.parametrize("name", ["tour", "blow_up"])


def read(name):
    return (EXAMPLES / f"{name}.ipynb").read_text("utf-8")


def code_of(name):
    return [cell for cell in json.loads(read(name))["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_it_runs(name, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for cell in code_of(name):
        exec(compile("".join(cell["source"]), f"{name}, {cell['id']}", "exec"), namespace)
    matplotlib.pyplot.close("all")


def test_it_was_run_in_order_and_without_an_error(name):
    cells = code_of(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_it_is_small_and_says_nothing_of_the_machine_it_ran_on(name):
    text = read(name)
    assert len(text) < 300_000
    assert "/tmp/" not in text and "/home/" not in text and "/work/" not in text
