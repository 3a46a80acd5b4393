"""Commands on records of runs, as a user sees them."""

from lab.report.fake_runs import usual_methods, write_comparison


def test_pack_prints_the_size_of_each_file_that_it_writes(run, tmp_path):
    methods = [method for method in usual_methods() if method.label != "polar"]  # which has a run that is not finished
    write_comparison(tmp_path / "full" / "digits", methods)
    code, out = run("pack", tmp_path / "full", "-o", tmp_path / "packed")
    [file] = (tmp_path / "packed").rglob("*.jsonl")
    assert code == 0 and f"{file}, {file.stat().st_size / 1000:.0f} kB" in out.replace("\n", "")
