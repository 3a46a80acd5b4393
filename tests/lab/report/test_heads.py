"""Maps of monitored runs on the page of a comparison."""

import numpy as np

from lab.report.fake_runs import usual_methods, write_comparison
from wellcond.lab.records import load_comparisons
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.page import gather, render_page
from wellcond.training.series import Series


def test_the_page_has_the_map_of_a_monitored_run_of_each_method(tmp_path):
    methods = usual_methods()[:3]
    write_comparison(tmp_path, methods)
    (comparison,) = load_comparisons(tmp_path)
    assert 'id="heads"' not in render_page(gather(analyse(comparison)))
    first, second, _ = (comparison.finished(method)[0].folder for method in comparison.methods)
    series = Series([("blocks.<0>.attn", 2), ("blocks.1.attn", 2)], ["max_logit", "entropy"])
    series.write_to(first / "monitor.jsonl")
    for step, largest in ((1, 3.0), (2, 60.0), (3, 150.0)):
        series.add(step, np.array([[2.0, 1.5], [largest, 0.5], [1.0, 1.0], [np.nan, 1.0]]))
    (second / "monitor.jsonl").write_text('{"kind": "something else"}\n')
    content = gather(analyse(comparison))
    shown, broken = content.heads
    assert shown.title == f"{comparison.methods[0]}, seed 0" and len(shown.alarms) == 1
    assert "blocks.<0>.attn, head 1" in shown.alarms[0] and "150" in shown.alarms[0]
    assert broken.maps == "" and "monitor.jsonl" in broken.problem
    page = render_page(content)
    assert 'id="heads"' in page and page.count('<table class="heads">') == 2
    assert 'title="head 1: 150"' in page and "blocks.&lt;0&gt;.attn" in page and "blocks.<0>" not in page
    assert broken.title in page
