"""Tables on a terminal: never wider than it is."""

import io

import pytest
from rich.console import Console

from lab.report.fake_runs import only_comparison, usual_methods, write_comparison
from wellcond.cli.console import make_console, print_table
from wellcond.cli.experiments import recipes
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.table import Table
from wellcond.lab.report.tables import build_tables


def terminal(width):
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def printed(out):
    return out.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_tables_of_a_comparison_fit(width, tmp_path):
    methods = usual_methods()
    methods[1].label = "tokens(embeddings=3, positions=50)+conditioned"
    analysis = analyse(only_comparison(write_comparison(tmp_path, methods, points=2, layers=1, heads=2)))
    for table in build_tables(analysis):
        out = terminal(width)
        print_table(out, table)
        assert max(map(len, printed(out))) <= width, table.name


def test_words_fold_before_numbers_go():
    row = ("a" * 30, "one two three four five six seven", "1.25", "12345678901234567890")
    table = Table("t", "T", ("id", "what", "x", "long"), (row,), (), frozenset({0, 1}))
    out = terminal(70)
    print_table(out, table)
    shown = "\n".join(printed(out))
    assert "1.25" in shown and "12345678901234567890" in shown and "Too narrow" not in shown
    out = terminal(65)
    print_table(out, table)
    shown = "\n".join(printed(out))
    assert "1.25" in shown and "12345678901234567890" in shown and "a..a" in shown
    out = terminal(45)
    print_table(out, table)
    shown = "\n".join(printed(out))
    assert "1.25" in shown and "1234567890" not in shown and "Too narrow for: long." in shown


def test_without_a_terminal_nothing_is_left_out():
    table = Table("t", "T", ("id", "number"), (("a" * 200, "1" * 50),))
    out = Console(file=io.StringIO(), width=make_console().width)
    print_table(out, table)
    assert f"{'a' * 200}  {'1' * 50}" in out.file.getvalue()


def test_a_recipe_takes_two_lines_at_most(monkeypatch):
    out = terminal(100)
    monkeypatch.setattr("wellcond.cli.console.make_console", lambda: out)
    recipes()
    lines = printed(out)
    assert max(map(len, lines)) <= 100
    starts = [at for at, line in enumerate(lines) if line[1:2].strip()]
    assert max(b - a for a, b in zip(starts[2:], starts[3:], strict=False)) <= 2
