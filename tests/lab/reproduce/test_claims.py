"""Verdicts follow from records by rule."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lab.report.fake_runs import PERPLEXITY, FakeMethod, write_comparison
from wellcond.lab.records import Metric
from wellcond.lab.report.analysis import HeadTable
from wellcond.lab.report.statistics import compare_paired, correct
from wellcond.lab.reproduce.catalogue import catalogue
from wellcond.lab.reproduce.claims import (
    QUANTITY,
    STRONG,
    Rule,
    _kappa,
    decide,
    judge_claims,
    judge_rules,
    read_claims,
)
from wellcond.lab.reproduce.claims_page import STAND_INS, claims_markdown, summarise

ACCURACY = Metric("accuracy", higher_is_better=True, percent=True)
RESULTS = Path(__file__).parents[3] / "results"


@pytest.mark.parametrize(
    ("values", "paper", "word"),
    [
        ([0.050, 0.052, 0.054], 0.05, "better"),
        ([-0.050, -0.052, -0.054], 0.05, "worse"),
        ([0.001, -0.001, 0.0005], 0.05, "equal"),  # well within half of 5 % of an error of 50 points
        ([0.05, -0.04, 0.03], 0.05, "undecided"),
        ([0.05, 0.06], 0.05, "undecided"),
        ([0.05, 0.05, 0.05], 0.05, "undecided"),  # no spread, no test
        ([0.0, 0.0, 0.0], 0.05, "equal"),
    ],
)
def test_gains_are_decided_by_rule(values, paper, word):
    base = dict.fromkeys(range(len(values)), 0.5)
    own = {seed: 0.5 + value for seed, value in enumerate(values)}
    [difference] = correct([compare_paired("a", own, "b", base, higher_is_better=True)])
    verdict = decide(difference, ACCURACY, base, paper)
    assert verdict.word == word
    assert verdict.as_claimed is (None if word == "undecided" else word == "better")


def test_the_papers_gain_is_carried_over_as_a_share_of_the_error_not_in_points():
    vit, gpt2 = (catalogue().entries[id].parts[0] for id in ("C-T1", "C-T7"))
    assert vit.share("conditioned", "default", "ViT-B") == pytest.approx(1.2 / 19.7)
    lower_is_better = gpt2.share("conditioned", "default", "TinyStories")
    assert lower_is_better == pytest.approx(0.18 / 2.47)  # of the perplexity itself
    values = [0.010, 0.012, 0.008, 0.011, 0.009]  # about a point, which is half of the paper's 1.2 and more
    verdicts = []
    for baseline in (0.2, 0.95):
        base = dict.fromkeys(range(5), baseline)
        own = {
            seed: baseline + sign * value for seed, (value, sign) in enumerate(zip(values, (1, -1) * 3, strict=False))
        }
        [difference] = correct([compare_paired("a", own, "b", base, higher_is_better=True)])
        verdicts.append(decide(difference, ACCURACY, base, 1.2 / 19.7).word)
    assert verdicts == ["equal", "undecided"]  # small beside an error of 80 points, not beside one of 5


def judge_fake(tmp_path, methods, rule, table="C-T1", **options):
    write_comparison(tmp_path / "study", methods, **options)
    [verdict] = judge_rules([(rule.model_copy(update={"folder": "study"}), table)], tmp_path)
    return verdict


def test_diverged_runs_cannot_win(tmp_path):
    finals = {seed: 0.5 + 0.001 * seed for seed in range(6)}
    strong = {seed: value + 0.2 + 0.002 * (seed % 2) for seed, value in finals.items()}
    rule = Rule(kind="gain", method="conditioned", over="default")
    methods = [FakeMethod("default", finals), FakeMethod("conditioned", strong, statuses={5: "diverged"})]
    verdict = judge_fake(tmp_path, methods, rule)
    assert verdict.word == "undecided" and "1 diverged" in verdict.evidence
    assert judge_fake(tmp_path / "whole", [methods[0], FakeMethod("conditioned", strong)], rule).word == "better"


@pytest.mark.parametrize(("moment", "word"), [("first", "better"), ("last", "undecided")])
def test_a_method_with_more_infinite_condition_numbers_cannot_win(moment, word):
    def measured(kappa, at_the_end):
        values = {seed: np.array([kappa + seed, kappa, kappa + seed, at_the_end, math.nan]) for seed in range(6)}
        steps = np.array([0.0, 0.0, 10.0, 10.0, 20.0])
        return [HeadTable(SimpleNamespace(seed=s), {"step": steps, QUANTITY: v}) for s, v in values.items()]

    tables = {"conditioned": measured(10.0, math.inf), "default": measured(1000.0, 1000.0)}
    rule = Rule(kind="kappa", method="conditioned", over="default", moment=moment)
    p, verdict_from = _kappa(rule, SimpleNamespace(tables=tables.get))
    verdict = verdict_from(p)
    assert verdict.word == word and verdict.evidence.startswith("lower by a factor of")
    assert ("infinite and in no mean: 6 of conditioned, 0 of default" in verdict.evidence) is (moment == "last")


@pytest.mark.parametrize(("seeds", "word"), [(5, "undecided"), (6, "better")])
def test_savings_of_epochs_have_an_exact_test(tmp_path, seeds, word):
    slow = {seed: [0.1, 0.2, 0.3, 0.4, 0.5] for seed in range(seeds)}
    fast = {seed: [0.1, 0.5, 0.5, 0.5, 0.6] for seed in range(seeds)}
    methods = [
        FakeMethod("default", dict.fromkeys(range(seeds), 0.5), curves=slow),
        FakeMethod("conditioned", dict.fromkeys(range(seeds), 0.6), curves=fast),
    ]
    rule = Rule(kind="saving", method="conditioned", at_least=0.25)
    verdict = judge_fake(tmp_path, methods, rule, epochs=4)
    assert verdict.word == word and "+75% of the epochs" in verdict.evidence
    [more] = judge_rules([(rule.model_copy(update={"folder": "study", "at_least": 0.9}), "")], tmp_path)
    assert more.as_claimed is (None if word == "undecided" else False)


def test_runs_that_ask_the_same_question_are_corrected_together(tmp_path):
    finals = {seed: 0.5 + 0.001 * seed for seed in range(6)}
    spread = dict(enumerate((0.022, 0.002, 0.014, 0.004, 0.018, 0.006)))  # p about 0.02
    own = {seed: value + spread[seed] for seed, value in finals.items()}
    methods = [FakeMethod("default", finals), FakeMethod("mimetic", finals), FakeMethod("conditioned", own)]
    for name in ("one", "two", "three"):
        write_comparison(tmp_path / name, methods)
    rule = Rule(kind="gain", method="conditioned", over="default")
    rules = [rule.model_copy(update={"folder": name}) for name in ("one", "two", "three")]
    others = [one.model_copy(update={"over": "mimetic"}) for one in rules]

    def words(asked, table=""):
        return [verdict.word for verdict in judge_rules([(one, table) for one in asked], tmp_path)]

    assert words(rules[:1]) == words([rules[0], others[0]])[:1] == ["better"]  # another question is no part of it
    assert "better" not in words(rules) + words(rules, "C-T1")  # whatever table a row is of


@pytest.mark.parametrize(("at_least", "word"), [(0.8, "equal"), (0.1, "undecided")])
def test_a_saving_below_half_of_the_papers_is_equal(tmp_path, at_least, word):
    curve = [0.1, 0.2, 0.3, 0.4, 0.5]
    faster = [0.1, 0.2, 0.3, 0.5, 0.6]
    methods = [
        FakeMethod("default", dict.fromkeys(range(6), 0.5), curves=dict.fromkeys(range(6), curve)),
        FakeMethod(
            "conditioned",
            dict.fromkeys(range(6), 0.5),
            curves={seed: faster if seed < 2 else curve for seed in range(6)},
        ),
    ]
    rule = Rule(kind="saving", method="conditioned", at_least=at_least)
    verdict = judge_fake(tmp_path, methods, rule, epochs=4)
    assert verdict.word == word and "less than half of it" in verdict.evidence


def test_the_strong_default_is_the_baseline_of_a_comparison_that_has_one(tmp_path):
    finals = {seed: 0.5 + 0.001 * seed for seed in range(6)}
    methods = [
        FakeMethod("tokens(embeddings=3)", {seed: value + 0.1 for seed, value in finals.items()}),
        FakeMethod("conditioned", {seed: value + 0.002 * (seed % 2) for seed, value in finals.items()}),
    ]
    rule = Rule(kind="gain", method="conditioned", over=STRONG)
    assert judge_fake(tmp_path, methods, rule, baseline="tokens(embeddings=3)").word == "worse"
    plain = [FakeMethod("default", finals), methods[1]]
    assert judge_fake(tmp_path / "plain", plain, rule).word == "no records"


def test_a_sweep_whose_winner_is_matched_is_equal(tmp_path):
    noise = [0.001, -0.001, 0.0005, -0.0005, 0.0, 0.0008, -0.0009, 0.0002]
    wide = {seed: 0.5 + 0.05 * noise[seed] / 0.001 for seed in range(8)}
    methods = [
        FakeMethod("default", wide),
        FakeMethod("a", {seed: value + 0.01 for seed, value in wide.items()}),
        FakeMethod("b", {seed: wide[seed] + 0.01 + noise[seed] for seed in wide}),
    ]
    rule = Rule(kind="best", among=("a", "b"), best=("a",))
    verdict = judge_fake(tmp_path, methods, rule)
    assert (verdict.word, verdict.as_claimed) == ("equal", False)


def test_perplexity_is_better_when_lower(tmp_path):
    finals = {seed: 40 + 0.1 * seed for seed in range(4)}
    lower = {seed: value - 3 - 0.01 * seed for seed, value in finals.items()}
    rule = Rule(
        kind="gain", method="conditioned", over="default", row="conditioned", base_row="default", column="TinyStories"
    )
    verdict = judge_fake(
        tmp_path, [FakeMethod("default", finals), FakeMethod("conditioned", lower)], rule, "C-T7", metric=PERPLEXITY
    )
    assert verdict.word == "better" and "of the error of default, the paper's +7.3%" in verdict.evidence


def test_claims_name_tables_that_exist():
    for claim in read_claims():
        ids = claim.table.replace(" to ", ", ").split(", ")
        assert set(ids) <= {*catalogue().entries, "theory"}
        if claim.rule.row:
            part = catalogue().entries[claim.table].parts[0]
            assert {claim.rule.row, claim.rule.base_row} <= set(part.numbers)
            assert set(claim.each or {claim.rule.column: ""}) <= set(part.columns)


def test_rows_name_what_ran_and_never_the_papers_set_up():
    runs = [one for one in judge_claims(RESULTS) if one.by_runs]
    assert len(runs) > 60
    for one in runs:
        assert one.ran or one.verdict.word == "no records"
        assert "ImageNet" not in one.claim.claim + one.ran and "-B" not in one.claim.claim + one.ran
    size = r"[\d.]+ M parameters; uoft-cs/cifar10, \d+ training samples; \d+ updates, [\d.]+ epochs; 10 seeds"
    model = "timm:vit_tiny_patch16_224, .*embed_dim 64, .*"
    assert any(re.fullmatch(f"{model}; recipe vit-patch8, scale tiny; {size}", one.ran) for one in runs)


def test_no_set_of_runs_is_counted_twice():
    """One comparison, two methods and one quantity answer one claim, and have one verdict wherever they are shown."""
    shown = {}
    for one in judge_claims(RESULTS):
        rule = one.claim.rule
        if one.by_runs:
            methods = frozenset([rule.method, rule.over, *rule.among])
            quantity = "score" if rule.kind in ("gain", "same", "best") else (rule.kind, rule.moment)
            shown.setdefault((rule.folder, rule.over_folder, methods, quantity), []).append(one)
    assert any(len(rows) > 1 for rows in shown.values())  # ViT-B on ImageNet and ViT-T on CIFAR-10
    for rows in shown.values():
        assert sum(one.counted for one in rows) <= 1
        assert len({one.verdict for one in rows}) == 1
        assert sum(one.same_runs is None for one in rows) == 1


def test_stand_ins_are_shown_and_not_counted():
    judged = judge_claims(RESULTS)
    runs = [one for one in judged if one.by_runs]
    own = {
        **dict.fromkeys(("CIFAR-10", "Image"), "uoft-cs/cifar10"),
        "Text": "stanfordnlp/imdb",
        "ListOps": "listops",
        "Pathfinder": "pathfinder",
        "TinyStories": "roneneldan/TinyStories",
    }
    for one in runs:
        assert "data" in one.claim.model_fields_set  # nothing is counted because its data were forgotten
        on_own_data = all(f"; {own.get(name)}, " in one.ran for name in one.claim.data)
        assert one.counted is (on_own_data and one.same_runs is None), one.claim
    setups = "\n".join(one.claim.setup for one in runs if one.counted)
    assert not re.search("ImageNet|Pets|WikiText-103|Retrieval", setups) and "ViT-T, CIFAR-10" in setups
    text = claims_markdown(judged)
    counted, others = sum(one.counted for one in runs), sum(not one.counted for one in runs)
    assert summarise(judged).startswith(f"{counted} claims by runs on the paper's own data: ")
    assert f" {others} rows are stand-ins" in text
    for title, body in re.findall(r"(?ms)^##+ ([^\n]+)\n(.*?)(?=^##|\Z)", text):
        assert ("as claimed |" in body) is (title.startswith("Paper")), title
    assert text.count(f"### {STAND_INS}") == 2


def test_without_records_nothing_is_decided(tmp_path):
    judged = judge_claims(tmp_path)
    assert {one.verdict.word for one in judged if one.by_runs} == {"no records"}
    assert {one.verdict.word for one in judged if not one.by_runs} == {""}
    assert all(one.verdict.as_claimed is None and one.verdict.evidence for one in judged)


def test_every_test_that_proves_a_claim_exists():
    proved = [claim.rule.why for claim in read_claims() if claim.rule.kind == "proved"]
    assert len(proved) == 6
    for why in proved:
        tests = re.findall(r"(tests/\S+\.py)::(test_\w+)", why)
        assert tests and why.startswith(("holds", "fails"))
        for path, name in tests:
            assert f"\ndef {name}(" in (RESULTS.parent / path).read_text("utf-8"), name


def test_the_markdown_holds_every_claim_and_no_markup_of_their_own(tmp_path):
    judged = judge_claims(tmp_path)
    claim = judged[0].claim.model_copy(update={"claim": "<b>a | b</b>"})
    judged[0] = replace(judged[0], claim=claim)
    text = claims_markdown(judged)
    assert "<b>a" not in text and text.count("\n| ") == len(judged) + 6
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[2:] == ["## Decided by proof", "## Not decided at this size"]
