import math

import numpy as np
import pytest

from wellcond.errors import UnknownChoiceError
from wellcond.training.alarms import Alarms
from wellcond.training.heads_map import make_map, render_maps, show_map
from wellcond.training.series import Series


def grown():
    series = Series([("blocks.0.attn", 3), ("blocks.1.attn", 3)], ["max_logit", "entropy"])
    for step, largest in enumerate([3.0, 30.0, 130.0, 400.0], 1):
        table = np.array([[2.0, 1.0], [4.0, 0.5], [math.nan, math.nan], [largest, 2.0], [5.0, 1.5], [math.inf, 1.0]])
        series.add(10 * step, table)
    return series


def test_the_worst_is_said_in_words_and_the_unseen_shown_as_such():
    found = make_map(grown())
    assert found.step == 40 and found.words.endswith("blocks.1.attn head 2, inf (inf at step 20)")
    (_, first, _), (_, second, _) = found.rows
    assert first.tolist() == [1, 1, 0] and second.tolist()[0] == 8 and second.tolist()[2] == 8
    low = make_map(grown(), "entropy")
    assert "worst: blocks.0.attn head 1, 0.5" in low.words and low.rows[0][1].tolist()[1] == 8
    with pytest.raises(UnknownChoiceError, match="max_logit"):
        make_map(grown(), "entropie")


def test_text_and_page_have_map_and_alarms():
    series = grown()
    alarms = Alarms.replay(series)
    text = show_map(series, alarms=alarms, width=80)
    assert "blocks.1.attn  █" in text and "QKClip" in text and f"{len(alarms)} alarms" in text
    page = render_maps(series, alarms=alarms, title="<run>")
    assert page.startswith("<!DOCTYPE html>") and "&lt;run&gt;" in page and "<script" not in page
    assert page.count("<td") == 12 and 'title="head 0: 400"' in page


def test_a_run_without_readings_yet():
    series = Series([("attn", 2)], ["max_logit"])
    assert "not seen in any head yet" in show_map(series) and "No alarm" in render_maps(series)
