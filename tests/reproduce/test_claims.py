"""Verdicts follow from records by rule."""

import pytest

from wellcond.report.run_record import Metric
from wellcond.report.statistics import compare_paired, correct
from wellcond.reproduce.catalogue_files import entries
from wellcond.reproduce.claim_rules import NO_RECORDS, NOT_REPRODUCED, NOT_TESTABLE, REPRODUCED, _decide
from wellcond.reproduce.claims import judge_claims, read_claims
from wellcond.reproduce.claims_page import claims_html, claims_markdown
from wellcond.reproduce.paper_numbers import paper_tables

ACCURACY = Metric("accuracy", higher_is_better=True, percent=True)


@pytest.mark.parametrize(
    ("values", "expected", "word"),
    [
        ([0.050, 0.052, 0.054], 1.0, REPRODUCED),
        ([-0.050, -0.052, -0.054], 1.0, NOT_REPRODUCED),
        ([0.001, -0.001, 0.0005], 1.0, NOT_REPRODUCED),  # the interval ends below one point
        ([0.05, -0.04, 0.03], 1.0, NOT_TESTABLE),
        ([0.001, -0.001, 0.0005], None, NOT_TESTABLE),
        ([0.05, 0.06], 1.0, NOT_TESTABLE),
        ([0.05, 0.05, 0.05], 1.0, NOT_TESTABLE),
        ([0.0, 0.0, 0.0], 1.0, NOT_TESTABLE),  # without spread there is no interval, here as above
    ],
)
def test_gains_are_decided_by_rule(values, expected, word):
    base = dict.fromkeys(range(len(values)), 0.0)
    [difference] = correct([compare_paired("a", dict(enumerate(values)), "b", base, higher_is_better=True)])
    assert _decide(difference, ACCURACY, expected, "").word == word


def test_claims_name_tables_that_exist():
    for claim in read_claims():
        ids = claim.table.replace(" to ", ", ").split(", ")
        assert set(ids) <= {*entries(), "theory"}
        if claim.rule.row:
            part = paper_tables()[claim.table].parts[0]
            assert {claim.rule.row, claim.rule.base_row} <= set(part.rows)
            assert set(claim.each or {claim.rule.column: ""}) <= set(part.columns)


def test_without_records_only_what_is_computed_is_decided(tmp_path):
    judged = judge_claims(tmp_path)
    decided = {one.claim for one in judged if one.verdict.word in (REPRODUCED, NOT_REPRODUCED)}
    computed = {claim.claim for claim in read_claims() if claim.rule.kind == "computed"}
    assert decided == computed
    assert {one.verdict.word for one in judged} == {REPRODUCED, NOT_REPRODUCED, NOT_TESTABLE, NO_RECORDS}


def test_pages_hold_every_claim_and_no_markup_of_their_own(tmp_path):
    judged = judge_claims(tmp_path)
    judged[0] = judged[0].model_copy(update={"claim": "<b>a | b</b>"})
    page, text = claims_html(judged), claims_markdown(judged)
    assert "<b>a" not in page and "&lt;b&gt;a | b" in page
    assert "<b>a" not in text and text.count("\n| ") == len(judged) + 2
