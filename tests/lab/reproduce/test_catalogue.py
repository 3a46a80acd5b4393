"""Every table, figure and ablation of the papers has an entry that can be planned at every scale."""

from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace

import numpy as np
import pytest

from wellcond.errors import UnknownChoiceError
from wellcond.lab.records import setting_differences
from wellcond.lab.reproduce.catalogue import SCALES, catalogue, find_entry
from wellcond.lab.reproduce.compare_with_paper import build_figures, outcome_tables
from wellcond.lab.reproduce.plan import PlanOptions, list_table, make_plan
from wellcond.lab.reproduce.studies import Collection, StoredStudy, find_study
from wellcond.lab.tasks.glue import NAMES

ABLATIONS = "lambda norm thm partial out vscale cost match scale vlayout gran mimetic roles qknorm ws".split()
IDS = [
    *(f"C-T{n}" for n in range(1, 14)),
    *(f"C-F{n}" for n in range(1, 8)),
    *(f"S-T{n}" for n in range(1, 13)),
    *(f"S-F{n}" for n in range(1, 22)),
    *(f"A-{name}" for name in ABLATIONS),
]
RESULTS = Path(__file__).parents[3] / "results"
WITHOUT_RECORDS = {"C-T8", "C-T10", "C-T11", "C-T12", "C-T13", "S-T10", "C-T3", "S-T2"}
OWN_METRICS = {"", "step_ratio", "peak_memory"}
ENTRIES = catalogue().entries
WITH_NUMBERS = [id for id, entry in ENTRIES.items() if any(part.numbers for part in entry.parts)]
DETECTION = {f"{side}_{name}" for side in ("box", "mask") for name in ("AP", "AP50", "AP75")}


def plan_of(id, scale, **options):
    return make_plan(id, ENTRIES[id], scale, PlanOptions(Path("nowhere"), **options))


def test_every_id_of_the_papers_has_an_entry():
    assert sorted(ENTRIES) == sorted(IDS)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("id", IDS)
def test_every_plan_is_sound(id, scale):
    plan = plan_of(id, scale)
    assert bool(plan.studies) is (ENTRIES[id].kind != "static")
    for study in plan.studies:
        assert study.recipe.scale == scale and study.title
        labels = [method.label for method in study.methods]
        assert study.recipe.baseline in labels and len(labels) == len(set(labels))
        assert len(study.jobs) == len(labels) * len(study.seeds)
    assert plan.runs == plan.missing


@pytest.mark.parametrize("id", IDS)
def test_metrics_and_variants_exist(id):
    entry = ENTRIES[id]
    for column in entry.columns.values():
        kind, _, task = column.metric.partition(":")
        assert column.metric in OWN_METRICS | DETECTION or (kind == "glue" and task in (*NAMES, "average"))
        assert kind != "glue" or catalogue().studies[column.study].glue
    assert {part.metric for part in entry.parts} <= OWN_METRICS
    assert {row.variant for row in entry.all_rows.values()} <= {"", *catalogue().variants}
    assert {name for row in entry.all_rows.values() for name in row.only} <= set(entry.columns)


@pytest.mark.parametrize("id", WITH_NUMBERS)
def test_entries_have_the_papers_rows_and_columns(id):
    for part in ENTRIES[id].parts:
        assert set(part.numbers) <= set(ENTRIES[id].rows)
        for rows in (part.numbers, part.stds, part.printed):
            assert set(rows) <= set(part.numbers) and {len(row) for row in rows.values()} <= {len(part.columns)}


def test_every_table_of_the_papers_has_its_numbers():
    assert {id for id in IDS if id[2] == "T"} - {"S-T8", "S-T9"} <= set(WITH_NUMBERS)  # those two are formulas


@pytest.mark.parametrize(
    ("id", "row", "base", "column", "gain"),
    [
        ("C-T1", "conditioned", "default", "ViT-B", 1.2),
        ("C-T2", "conditioned", "mimetic", "Pets", 0.0),
        ("C-T11", "conditioned", "default", "WikiText-103", 1.2),
        ("S-T4", "spectral", "original", "CoLA", 2.8),
        ("S-T6", "spectral - LayerNorm", "original (LayerNorm)", "DaViT-B", -4.0),
    ],
)
def test_gains_of_the_papers_are_positive_where_better(id, row, base, column, gain):
    assert ENTRIES[id].parts[0].gain(row, base, column) == pytest.approx(gain)


def test_averages_of_glue_are_those_of_the_columns():
    for id in ("C-T5", "S-T4"):
        for *tasks, average in ENTRIES[id].parts[0].numbers.values():
            assert sum(tasks) / 8 == pytest.approx(average, abs=0.06)


def test_figures_use_the_runs_of_the_tables():
    def folders(id, scale):
        return {job.folder for study in plan_of(id, scale).studies for job in study.jobs}

    for id in ("C-F1", "C-F2", "C-F4", "C-F5", "C-F6", "C-F7"):
        assert folders(id, "small") <= folders("C-T1", "small")
    assert folders("C-F5", "tiny") <= folders("C-T1", "tiny")
    assert not folders("C-F1", "tiny") & folders("C-T1", "tiny")  # evaluated and measured more often than it trains


def test_teachers_are_trained_before_students():
    plan = plan_of("C-T6", "tiny")
    assert [study.name for study in plan.studies] == ["teachers", "students-cifar10"]
    selected = {m.label: m.init_options["teacher"] for m in plan.studies[1].methods if m.init == "weight_selection"}
    label = "weight_selection(teacher=runs/teachers/conditioned/seed0, layout=blind)"
    assert selected[label] == "runs/teachers/conditioned/seed0"
    assert {job.folder.relative_to("nowhere") for job in plan.studies[0].jobs} >= {
        Path(folder) for folder in selected.values()
    }


def test_wishes_change_the_plan():
    plan = plan_of("C-T7", "tiny", seeds=(3, 4), methods=("conditioned",), overrides=("training.length.steps=7",))
    [study] = plan.studies
    assert [method.label for method in study.methods] == ["default", "conditioned"]
    assert study.seeds == (3, 4) and study.recipe.training.length.steps == 7


def test_ids_are_found_in_any_case():
    assert find_entry("c-t1") == ("C-T1", ENTRIES["C-T1"])
    with pytest.raises(UnknownChoiceError, match="C-T99"):
        find_entry("C-T99")


def test_rows_and_studies_of_a_scale():
    at_paper, at_tiny = ({m.label for m in plan_of("S-T7", scale).studies[0].methods} for scale in ("paper", "tiny"))
    assert at_paper == {"default", "polar(solver=svd)", "identity(lam=10, layout=per_head)", "polar"}
    assert at_tiny == {"default", "polar", "identity(lam=10)"}
    published = "weight_selection(teacher=timm:vit_small_patch16_224.augreg_in21k, layout=blind)"
    labels = {scale: {m.label for m in plan_of("C-T6", scale).studies[-1].methods} for scale in ("paper", "small")}
    assert published in labels["paper"] and published not in labels["small"]
    assert plan_of("C-T6", "small").left_out == ("ImageNet-21k + default: not run at scale small",)


def test_a_reading_is_an_option_of_an_id():
    entry = ENTRIES["S-T4"]
    assert entry.readings == {"model": "bert-12"}
    other = make_plan("S-T4", entry.read({"model": "crammed-bert"}), "paper", PlanOptions(Path("nowhere")))
    assert plan_of("S-T4", "paper").studies[0].recipe.name == "bert-12"
    assert other.studies[0].recipe.name == "crammed-bert"
    assert set(ENTRIES["S-F2"].readings) == {"mean", "weights", "jacobian"}
    assert ENTRIES["C-F1"].readings == {"mean": "arithmetic", "jacobian": "stacked"} and ENTRIES["C-T1"].readings == {}
    with pytest.raises(UnknownChoiceError, match="weights"):
        ENTRIES["C-F1"].read({"weights": "conditioned"})
    with pytest.raises(UnknownChoiceError, match="geometric"):
        ENTRIES["C-F1"].read({"mean": "harmonic"})


@pytest.mark.parametrize(
    ("id", "reading", "name", "field", "values"),
    [
        ("S-F8", {"jacobian": "joint"}, "vit-jacobian-joint", "tracking.stacked", (True, False)),
        ("S-T11", {"text": "1000"}, "lra-text-text-1000", "task.length", (4000, 1000)),
        ("C-T3", {"upsampling": "two"}, "coco-xcit-upsampling-two", "model.arguments.upsampling", ("single", "two")),
    ],
)
def test_a_reading_that_changes_what_runs_has_runs_of_its_own_at_scale_paper(id, reading, name, field, values):
    def value_in(plan):
        found = plan.studies[-1].recipe.model_dump()
        for key in field.split("."):
            found = found[key]
        return found

    other = make_plan(id, ENTRIES[id].read(reading), "paper", PlanOptions(Path("nowhere")))
    assert (value_in(plan_of(id, "paper")), value_in(other)) == values
    assert other.studies[-1].name == name
    small = make_plan(id, ENTRIES[id].read(reading), "tiny", PlanOptions(Path("nowhere")))
    assert [study.name for study in small.studies] == [study.name for study in plan_of(id, "tiny").studies]


def test_the_list_says_what_runs_and_not_what_the_paper_ran():
    rows = {row[0]: row for row in list_table("tiny", Path("nowhere")).rows}
    assert rows["C-T1"][2].startswith("ViT (width 64), DeiT (width 48), ") and rows["C-T1"][2].endswith(" on CIFAR-10")
    assert rows["C-T8"][2] == "GPT-2 (width 96) on TinyStories" and rows["S-T8"][2] == "computed, without runs"
    assert not any("ImageNet" in row[2] for row in rows.values())


def test_figures_follow_the_chosen_reading():
    """S-F7 at scale tiny: kappa of W_Q of both runs at the first measurement, from the committed rows themselves."""
    records = Collection(RESULTS, committed=True)
    stored = records.study(ENTRIES["S-F7"].at("tiny").address("W"))
    entry = ENTRIES["S-F7"].at("tiny")

    def first(chosen, panel, series):
        [figure, *_] = build_figures("S-F7", entry.read(chosen), records)
        [drawn] = [p for p in figure.panels if p.name == panel]
        return drawn.by_series()[series]["mean"][0].value

    def by_hand(method, key, mean):
        return mean([mean(table.at(key, 0.0)) for table in stored.analysis.tables(method)])

    spectral = "identity(lam=10)"
    assert first({}, "W", "W_Q") == pytest.approx(by_hand("default", "kappa_q", np.mean))
    assert first({"weights": "conditioned"}, "W", "W_Q") == pytest.approx(by_hand(spectral, "raw_kappa_q", np.mean))
    assert first({}, "W + C", "W_Q + C_Q") == pytest.approx(by_hand(spectral, "kappa_q", np.mean))
    geometric = {"mean": "geometric"}
    assert first(geometric, "W", "W_Q") == pytest.approx(by_hand("default", "kappa_q", geometric_mean))
    assert first({}, "W", "W_Q") > first(geometric, "W", "W_Q")


def test_training_time_is_that_of_runs_alone_on_their_machine():
    def run(seconds, alone=True):
        return SimpleNamespace(alone=alone, part=lambda name: {"training": seconds})

    runs = {0: run(3600.0), 1: run(3600.0 + 2 * 540), 2: run(1e6, alone=False)}
    comparison = SimpleNamespace(methods=("default",), finished=lambda method: runs)
    assert StoredStudy(comparison).training_time(ENTRIES["S-T7"].rows["original"]) == "1:09"


CORE = ("task.name", "task.length", "task.image_size", "data.source", "data.id", "data.config", "model")
"""What makes two runs the same experiment; rates, splits and lengths of a recipe may move on before it is run again."""


def core_differences(plan, stored):
    """Fields in which a planned study and a stored comparison differ: of the core, or set by the catalogue itself."""
    fields = (*CORE, *(setting.partition("=")[0] for setting in plan.settings.settings))
    made, config = plan.recipe.config(plan.methods[0], 0), stored.runs[0].record["config"]
    names = [] if stored.recipe == plan.recipe.name else [f"recipe: {stored.recipe} and {plan.recipe.name}"]
    return names + [line for line in setting_differences(config, made) if line.startswith(fields)]


@pytest.mark.parametrize("id", [id for id in IDS if ENTRIES[id].kind != "static"])
def test_at_scale_tiny_an_id_runs_what_its_records_ran(id):
    entry = ENTRIES[id]
    planned = {study.name: study for study in plan_of(id, "tiny").studies}
    records = Collection(RESULTS, committed=True)
    compared = 0
    for address in entry.at("tiny").addresses():
        stored, plan = records.study(address), planned.get(address.name)
        if stored is not None and plan is not None:
            assert core_differences(plan, stored.comparison) == [], address
            compared += 1
    assert compared or id in WITHOUT_RECORDS


def test_the_table_of_small_image_sets_shows_the_records_there_are():
    [table] = outcome_tables("C-T2", ENTRIES["C-T2"].at("tiny"), "tiny", Collection(RESULTS, committed=True))
    counts = {(row["column"], row["row"]): row.get("n", 0) for row in table.values}
    assert {column for (column, _), count in counts.items() if count} == {"Pets", "CIFAR-10"}
    assert {count for (column, _), count in counts.items() if column in ("Pets", "CIFAR-10")} == {10}


def test_another_recipe_or_setting_than_that_of_the_records_would_be_found():
    [short] = plan_of("S-T5", "tiny").studies
    of_deit = find_study(RESULTS / "evidence/deit").comparison
    assert core_differences(short, of_deit)[0] == "recipe: deit and vit-patch8"
    cut = short.settings.model_copy(update={"settings": ("optimizer.lr=0.5",)})
    recipe = short.recipe.model_copy(update={"optimizer": short.recipe.optimizer.model_copy(update={"lr": 0.5})})
    stored = find_study(RESULTS / "evidence/ablations/vision").comparison
    assert core_differences(short, stored) == []
    assert core_differences(replace(short, settings=cut, recipe=recipe), stored) == ["optimizer.lr: 0.0022 and 0.5"]
