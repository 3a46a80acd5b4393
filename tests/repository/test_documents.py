"""Python and `bash` blocks of the documents run, recipes are valid, listed commands exist (and are run elsewhere)."""

import inspect
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

import wellcond
import wellcond.theory
from lab.helpers import parse_recipe
from wellcond.cli.main import load_app
from wellcond.conditioning.methods import METHODS as CONDITIONS
from wellcond.init.apply import METHODS as INITIALISATIONS
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]+))?\)")
# no dependencies of ours
NEEDS = {"training/lightning.md": "lightning", "training/peft.md": "peft", "export.md": "onnxruntime"}


def name_of(path):
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


def blocks_of(path, *languages):
    return [text for language, text in BLOCK.findall(path.read_text("utf-8")) if language in languages]


def with_blocks(*languages):
    return [pytest.param(path, id=name_of(path)) for path in DOCUMENTS if blocks_of(path, *languages)]


def commands_in(block):
    """Arguments of each line that calls wellcond, directly or through a launcher of processes."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for start in ("wellcond", "wellcond.cli.main"):
            if start in words:
                yield words[words.index(start) + 1 :]


@pytest.mark.parametrize("path", with_blocks("python"))
@pytest.mark.filterwarnings(
    "error::wellcond.EvidenceWarning",  # no page shows a start that our records advise against
    "ignore::wellcond.NumericalWarning",
    "ignore:::lightning",
    "ignore:.*:UserWarning:lightning",
    "ignore:.*pin_memory",
    "ignore:DTensor random operators",
)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    if name_of(path) in NEEDS:
        pytest.importorskip(NEEDS[name_of(path)], reason=f"{NEEDS[name_of(path)]} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # what a page sets, it sets for itself
    namespace = {"__name__": "__main__"}
    for block in blocks_of(path, "python"):  # one document is one session
        exec(compile(block, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", with_blocks("bash"))
def test_bash_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(path, "bash"):
        commands = list(commands_in(block))
        assert len(commands) == len(block.strip().splitlines()), "lines that are not run belong into a plain block"
        for arguments in commands:
            with pytest.raises(SystemExit) as end:
                load_app()(arguments)
            assert not end.value.code, arguments


@pytest.mark.parametrize("path", with_blocks("sh"))
def test_scripts_of_other_systems_are_shell(path):
    """What needs a cluster is read by the shell, not run; the lines of wellcond in it have tests of their own."""
    for block in blocks_of(path, "sh"):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", with_blocks(""))
def test_listed_commands_exist(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/digits-tiny", "runs/digits", "runs/bert", "results/evidence"):  # of earlier commands
        Path(folder).mkdir(parents=True)
    for file in ("last.pth.tar", "results/evidence/digits.jsonl"):
        Path(file).touch()
    group = typer.main.get_command(load_app())
    for arguments in [arguments for block in blocks_of(path, "") for arguments in commands_in(block)]:
        with group.make_context("wellcond", list(arguments[:1]), resilient_parsing=True) as context:
            name, command, _ = group.resolve_command(context, list(arguments))
        with command.make_context(name, list(arguments[1:])) as context:
            recipe = context.params.get("recipe")
            if recipe is not None and not recipe.endswith(".yaml"):
                load_recipe(recipe, scale=context.params["scale"], overrides=context.params["set"] or ())


@pytest.mark.parametrize("path", with_blocks("yaml"))
def test_recipes_are_valid(path):
    for block in blocks_of(path, "yaml"):
        fields = yaml.safe_load(block)
        if "model" in fields:
            parse_recipe(block)
            continue
        assert set(fields) <= set(Recipe.model_fields), "a part of a recipe"
        methods = [MethodSettings.model_validate(method) for method in fields.get("methods", ())]
        assert len({method.slug for method in methods}) == len(methods)


def test_documents_name_only_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        path: set(re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text("utf-8"), re.MULTILINE)) for path in DOCUMENTS
    }
    assert {"demo", "test"} <= named[ROOT / "README.md"]
    for path, names in named.items():
        assert names <= targets, name_of(path)


def test_relative_links_lead_somewhere():
    for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for link, fragment in LINK.findall(re.sub(BLOCK, "", path.read_text("utf-8"))):
            target = path.parent / link if link else path
            assert target.exists(), f"{path.name}: {link}"
            if fragment and target.suffix == ".py":
                assert re.search(rf"^def {fragment}\(", target.read_text("utf-8"), re.MULTILINE), f"{link}#{fragment}"


def test_every_page_is_in_the_navigation():
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert {name_of(path) for path in DOCUMENTS[1:]} == {path for path in listed if not path.startswith("results/")}


PAPERS = {
    "C": "[*Conditioned Initialization for Attention*](https://openreview.net/forum?id=cKNOCYPo2W)",
    "S": "[*Spectral Conditioning of Attention Improves Transformer Performance*](https://arxiv.org/abs/2603.07162)",
}


def test_papers_are_named_and_linked_where_they_are_mentioned_first():
    pages = 0
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        for letter, link in PAPERS.items():
            mention = re.search(rf"\b[Pp]aper {letter}\b", text)
            if mention is not None:
                assert mention.start() <= text.find(link) < mention.start() + 200, f"{name_of(path)}: paper {letter}"
                pages += 1
    assert pages > 10


def test_formulas_within_text_are_left_alone_by_markdown():
    r"""GitHub reads emphasis and escapes before `$...$`: no `\,`, no `}_`, no `|`; a formula ends on its line."""
    formulas = 0
    for path in DOCUMENTS:
        for line in re.sub(r"`[^`\n]*`", "`", re.sub(BLOCK, "", path.read_text("utf-8"))).splitlines():
            pieces = line.split("$")
            assert len(pieces) % 2, f"{path.name}: {line}"
            for before, formula, after in zip(pieces[::2], pieces[1::2], pieces[2::2], strict=False):
                assert formula == formula.strip() != "", f"{path.name}: {line}"
                assert not re.search(r"\\[^A-Za-z]|[)\]}]_|[*|`~]|<\S|operatorname", formula), f"{path.name}: {formula}"
                assert not before[-1:].isalnum() and not after[:1].isalnum(), f"{path.name}: {formula}"
                formulas += 1
    assert formulas > 500


@pytest.mark.parametrize("method", sorted({**INITIALISATIONS, **CONDITIONS}))
def test_every_method_has_a_card_with_its_options(method):
    card = (DOCS / "methods" / f"{method.replace('_', '-')}.md").read_text("utf-8")
    for part in ("**What.**", "**When.**", "**Cost.**", "**Evidence"):
        assert part in card
    make = INITIALISATIONS.get(method) or CONDITIONS[method]
    options = {p.name for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY}
    table = card[card.index("| option |") : card.index("**Cost.**")]
    assert {option for option in options if f"`{option}`" not in table} == set()


def test_every_erratum_is_in_the_table():
    written = (DOCS / "theory.md").read_text("utf-8")
    tests = "".join(path.read_text("utf-8") for path in sorted((ROOT / "tests" / "theory").glob("test_errata_*.py")))
    names = re.findall(r"^def (test_E\d+\w*)", tests, re.MULTILINE)
    assert len(names) == 25
    for name in names:
        assert f"#{name})" in written, name
    assert [int(n) for n in re.findall(r"^\| E(\d+) \|", written, re.MULTILINE)] == list(range(1, 27))


def test_every_section_of_the_theory_that_the_code_cites_exists():
    numbers = set(re.findall(r"^#+ (\d+(?:\.\d+)?)\.? ", (DOCS / "theory.md").read_text("utf-8"), re.MULTILINE))
    cited = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text("utf-8")
        assert not re.search(r"theory\.md[, ]+\d|theory\.md, sections", text), (
            f"{path.name}: write theory.md, section N"
        )
        found = re.findall(r"theory\.md, section (\d+(?:\.\d+)?)|ours\(f?\"section (\d+(?:\.\d+)?)", text)
        assert len(found) == len(re.findall(r"theory\.md, section|ours\(f?\"", text)), path.name
        cited += [(path.name, one or other) for one, other in found]
    assert len(cited) >= 15
    assert [place for place in cited if place[1] not in numbers] == []


@pytest.mark.parametrize("module", [wellcond, wellcond.theory], ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module):
    listed = "".join(path.read_text("utf-8") for path in (DOCS / "api").glob("*.md")).splitlines()
    assert {name for name in module.__all__ if f"::: {module.__name__}.{name}" not in listed} == set()
