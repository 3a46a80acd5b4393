"""Rules of the source tree that a reader relies on."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wellcond
from wellcond import errors
from wellcond.arguments import CORRECTIONS, INITIALISATIONS

SRC = Path(wellcond.__file__).parent
BASE = {"errors", "arguments", "files", "version", "private", "pages"}
CORE = BASE | {"linalg", "attention", "init", "conditioning", "theory", "jacobian", "measurement", "doctor", "training"}
ALLOWED = {
    "errors": set(),
    "arguments": {"errors"},
    "files": set(),
    "version": set(),
    "private": set(),
    "pages": {"errors"},
    "linalg": BASE,
    "attention": BASE | {"linalg"},
    "init": BASE | {"linalg", "attention"},
    "conditioning": BASE | {"linalg", "attention", "init"},
    "theory": BASE | {"linalg", "jacobian"},
    "jacobian": BASE | {"linalg", "attention"},
    "measurement": BASE | {"linalg", "attention", "conditioning", "jacobian"},
    "doctor": BASE | {"linalg", "attention", "init", "conditioning", "jacobian", "measurement"},
    "training": BASE | {"linalg", "attention", "conditioning", "measurement"},
    "integrations": BASE | {"attention", "init", "conditioning", "measurement", "training"},
    "lab": CORE | {"integrations"},
}
EXTRAS = """
    timm torchvision pycocotools transformers tokenizers datasets sklearn typer rich safetensors accelerate pydantic
    yaml matplotlib pandas lightning pytorch_lightning peft ray
""".split()


@functools.cache
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def imported(path):
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            yield from ([f"wellcond.{a.name}" for a in node.names] if node.module == "wellcond" else [node.module])


def test_imports_point_downwards():
    for path in SRC.rglob("*.py"):
        layer = path.relative_to(SRC).parts[0].removesuffix(".py")
        for name in imported(path) if layer not in ("__init__", "cli") else ():
            root, *rest = name.split(".")
            allowed = root != "wellcond" or rest[0] in ALLOWED[layer] | {layer}
            assert allowed, f"{path.relative_to(SRC)} may not import {name}"


LAB = [
    {"settings", "seeding", "records", "nystrom", "optimizers", "acting"},
    {"data"},  # with tokenizers, which are trained on data
    {"user_code", "models"},
    {"methods", "tasks"},
    {"recipe", "recipes"},
    {"train"},
    {"plan", "pool"},
    {"cluster", "report"},
    {"tune"},
    {"comparison"},
    {"trial", "reproduce"},
]
"""Packages of the laboratory: recipe, jobs, pool, training, report. An import leads to an earlier row, or to a package
of the same row that does not import back."""


def test_the_laboratory_has_no_cycle_and_no_arrow_back():
    rows = {name: row for row, names in enumerate(LAB) for name in names}
    arrows = set()
    for path in (SRC / "lab").rglob("*.py"):
        here = path.relative_to(SRC / "lab").parts[0].removesuffix(".py").replace("tokenizers", "data")
        if here == "__init__":
            continue
        for name in imported(path):
            parts = name.split(".")
            there = parts[2].replace("tokenizers", "data") if name.startswith("wellcond.lab.") else here
            if there != here:
                assert rows[there] <= rows[here], f"{path.relative_to(SRC)}: {here} may not import {there}"
                arrows.add((here, there))
    graph = {name: {there for here, there in arrows if here == name} for name in rows}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # CycleError names a cycle


READ_BY_REPORTS = ("lab.report", "lab.records", "training.alarms", "training.heads_map", "training.series")
"""Stored runs, and the stored readings of a monitor."""


def test_the_report_imports_no_training():
    for path in (SRC / "lab" / "report").glob("*.py"):
        for name in imported(path):
            inside = name.removeprefix("wellcond.")
            allowed = inside.startswith(READ_BY_REPORTS) or inside.split(".")[0] in BASE
            assert not name.startswith("wellcond.") or allowed, name


def test_data_know_no_task():
    for path in (SRC / "lab" / "data").rglob("*.py"):
        for name in imported(path):
            assert not name.startswith("wellcond.lab.tasks"), f"{path.relative_to(SRC)} imports {name}"


@pytest.mark.parametrize("name", ["problem", "solve", "ends"])
def test_solvers_know_no_concrete_operator(name):
    """A new operator edits no solver: what it knows it says by its gram and its hints."""
    path = SRC / "jacobian" / f"{name}.py"
    allowed = {f"wellcond.jacobian.{one}" for one in ("ends", "operator", "problem", "ranks")}
    used = {one for one in imported(path) if one.startswith("wellcond.jacobian")} - {"wellcond.jacobian"}
    assert used <= allowed
    calls = [node.func for node in nodes_of(path) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    assert not called & {"isinstance", "getattr", "hasattr"}


OPERATOR = {"shape", "matvec", "rmatvec", "rank_bound", "as_matrix", "gram", "hints"}


def test_an_operator_overrides_seven_members_and_nothing_else():
    import wellcond.jacobian.select  # noqa: F401  (the operators of the core)
    import wellcond.lab.nystrom  # noqa: F401
    from wellcond.jacobian.operator import JacobianOperator

    assert JacobianOperator.__abstractmethods__ == {"shape", "matvec", "rmatvec", "rank_bound"}
    members = {name for name in vars(JacobianOperator) if not name.startswith("__") and name != "_abc_impl"}
    for kind in JacobianOperator.__subclasses__():
        assert set(vars(kind)) & members <= OPERATOR, kind


IMPORTING = f"""
import logging, sys, warnings
before = len(warnings.filters), logging.getLogger().handlers[:]
import wellcond, wellcond.arguments
assert before == (len(warnings.filters), logging.getLogger().handlers[:])
assert [name for name in {["torch", *EXTRAS]} if name in sys.modules] == []
"""


def test_importing_wellcond_loads_no_torch_and_changes_no_global_state():
    subprocess.run([sys.executable, "-c", IMPORTING], check=True)


@pytest.mark.parametrize("methods, folder", [(INITIALISATIONS, "init"), (CORRECTIONS, "conditioning")])
def test_the_files_of_a_package_are_the_list_of_methods(methods, folder):
    files = "".join(path.read_text("utf-8") for path in (SRC / folder).glob("*.py"))
    written = re.findall(r'^@register_(?:init|condition)\("(\w+)"', files, re.MULTILINE)
    assert {name for name, method in methods.items() if method.__module__.startswith("wellcond")} == set(written)


def test_every_error_is_defined_in_one_file():
    for path in set(SRC.rglob("*.py")) - {SRC / "errors.py"}:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                bases = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
                ours = [base for base in bases if isinstance(getattr(errors, base, None), type)]
                assert not ours and not any(base.endswith("Warning") for base in bases), f"{path.name}: {node.name}"


def test_no_submodule_hides_a_public_function():
    modules = {path.stem for path in SRC.iterdir() if path.stem != "__init__"}
    assert not modules & set(wellcond.__all__)


def test_every_public_name_exists_and_is_documented():
    for name in wellcond.__all__:
        assert getattr(wellcond, name).__doc__, name


WITHOUT_EXTRAS = """
import sys
for name in ("pydantic", "yaml", "safetensors", "timm", "torchvision", "transformers", "typer", "rich"):
    sys.modules[name] = None  # importing it fails
import tempfile
from pathlib import Path

import torch
import wellcond as wc
import wellcond.lab
from wellcond.cli.main import main
from wellcond.conditioning.checkpoint import save_weights
from wellcond.lab.models.weights import load_weights, read_state_dict
from wellcond.lab.models.build import build_model

torch.manual_seed(0)
model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
names, batch = list(model.state_dict()), torch.randn(1, 6, 16)
[site] = wc.find_attention(model)
wc.init_(model, "conditioned")
plain = wc.measure(model, batch).layers[0].heads[0].jacobian
wc.condition_(model, "balanced")
before = model(batch)
wc.fold_(model)
assert torch.allclose(model(batch), before, atol=1e-5) and list(model.state_dict()) == names
assert plain.sigma_max > 0 and wc.measure(model, batch).layers[0].heads[0].jacobian.sigma_max > 0

folder = Path(tempfile.mkdtemp())
torch.save(model.state_dict(), folder / "model.pt")
load_weights(model, folder / "model.pt")
(folder / "model.safetensors").write_bytes(b"")
for call in (
    lambda: build_model("timm:vit_tiny_patch16_224"),
    lambda: build_model("hf:bert"),
    lambda: build_model("wellcond:long_range"),
    lambda: read_state_dict(folder / "model.safetensors"),
    lambda: save_weights(model, folder / "other.safetensors"),
):
    try:
        call()
    except wc.MissingExtraError as error:
        print(error.package, error.extra)
main()
"""


def test_without_any_extra_the_core_works_and_names_what_is_missing():
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'wellcond[cli]'" in done.stderr, done.stderr  # of `main`
    assert done.stdout.splitlines() == [
        "timm vision",
        "transformers text",
        "pydantic train",
        "safetensors cli",
        "safetensors cli",
    ]


def walked(call):
    """Files of wellcond whose code runs in a call; importing them does not count."""
    files, before = set(), sys.getprofile()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(SRC)) and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return sorted(files)


def test_every_verb_walks_through_few_files():
    """A reader who follows `init_`, `condition_` with a forward and `fold_`, `measure` of a head, or `diagnose`, opens
    this many files."""
    timm = pytest.importorskip("timm")
    model, images = timm.create_model("test_vit"), torch.randn(1, 3, 160, 160)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    small = timm.create_model("vit_tiny_patch16_224", **sizes)  # whose Jacobians take milliseconds

    def initialise():
        wellcond.init_(model, "conditioned")

    def condition():
        wellcond.condition_(model, "balanced")
        model(images)
        wellcond.fold_(model)

    def measure():
        wellcond.measure(small, images[..., :32, :32], layers=[0], heads=[0])

    def diagnose():
        wellcond.diagnose(model, images)

    for call, most in ((initialise, 13), (condition, 16), (measure, 23), (diagnose, 18)):
        call()  # what is imported or computed once
        files = walked(call)
        assert len(files) <= most, files


def walked_in_laboratory(call):
    """Files of `lab` and `cli` whose code runs in a call."""
    folders = tuple(str(SRC / name) for name in ("lab", "cli"))
    return [file for file in walked(call) if file.startswith(folders) and file.endswith(".py")]


@pytest.mark.slow
def test_a_comparison_walks_to_its_page_through_few_files(tmp_path):
    """Three runs each of two methods in this process, by the command, with the page at the end."""
    pytest.importorskip("matplotlib")
    from wellcond.cli.main import load_app

    arguments = ["compare", "--recipe", "digits", "--methods", "default,gaussian", "--seeds", "3", "--jobs", "1"]
    for change in ("training.length={steps: 4}", "evaluation.every={steps: 2}", "tracking.jacobian_points=0"):
        arguments += ["--set", change]

    def compare(folder):
        with pytest.raises(SystemExit) as end:
            load_app()([*arguments, "--cpu", "--quiet", "--folder", str(folder)])
        assert end.value.code == 0 and (folder / "report" / "report.html").is_file()

    compare(tmp_path / "first")  # what is imported or computed once
    files = walked_in_laboratory(lambda: compare(tmp_path / "second"))
    assert len(files) <= 40, files


def test_a_story_walks_to_its_loss_through_few_files(tmp_path, monkeypatch):
    """From a file of stories through tokens and a batch to the loss of a model."""
    pytest.importorskip("transformers")
    from wellcond.lab.methods import MethodSettings
    from wellcond.lab.recipe import load_recipe
    from wellcond.lab.train import prepare

    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "cache"))
    (tmp_path / "stories.txt").write_text("Once upon a time there was a cat who had a red ball.\n" * 400)
    data = {"source": "files", "train": str(tmp_path / "stories.txt"), "evaluation_fraction": 0.1}
    recipe, _ = load_recipe(
        "gpt2-tinystories", changes={"data": data}, overrides=["evaluation.test=null", "task.tokenizer.vocabulary=280"]
    )

    def build_task():
        prepare._KEPT.clear()
        prepare.load_cached_data.cache_clear()
        return prepare.prepare_task(recipe, seed=0, base=None)

    task = build_task()  # what is imported or computed once
    model = prepare.prepare_model(recipe, MethodSettings.model_validate("default"), task, seed=0, base=None)

    def train_on_a_story():
        task = build_task()
        task.loss(model, task.train.fetch([(0, 0), (1, 0)])).backward()

    files = walked_in_laboratory(train_on_a_story)
    assert len(files) <= 9, files


TESTS = Path(__file__).parent
MIRROR_NOTHING = {"contracts", "distributed", "export", "repository", "security"}
"""What holds for every family, for two processes, for exported models, for the files of the repository, for input."""


def is_mirrored(path):
    """Whether a test lies where the module that it tests does.

    The tests of `a/b.py` are `a/test_b.py`; more of them are `a/test_b_topic.py` or in a folder `a/b`.
    """
    folder, words = SRC / path.parent, path.stem.removeprefix("test_").split("_")
    places = [folder / "_".join(words[:count]) for count in range(1, len(words) + 1)]
    if any(place.is_dir() or place.with_suffix(".py").is_file() for place in places):
        return True
    holds_no_module = [module.name for module in folder.glob("*.py")] == ["__init__.py"]  # lab/recipes
    return folder.with_suffix(".py").is_file() or holds_no_module


FOLDERS = {path.name for path in TESTS.iterdir() if path.is_dir()}


@pytest.mark.parametrize("folder", sorted(FOLDERS - MIRROR_NOTHING - {"__pycache__"}))
def test_tests_mirror_the_tree(folder):
    tests = [path.relative_to(TESTS) for path in (TESTS / folder).rglob("test_*.py")]
    assert [str(path) for path in tests if not is_mirrored(path)] == []
