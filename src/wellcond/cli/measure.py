"""`wellcond doctor` and `wellcond measure`: what is wrong with a model's attention, and its numbers on an input."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Annotated, Any

from rich.progress import track
from typer import Option

from wellcond.arguments import check_choice
from wellcond.cli import app as cli
from wellcond.cli.console import echo, echo_json, make_console
from wellcond.errors import WellcondError
from wellcond.files import to_json, write_atomically

if TYPE_CHECKING:
    from torch import nn

    from wellcond.measurement.records import MeasurementReport

CONVENTIONS = ("wide", "stack")
"""Of `wellcond.jacobian.problem`, which loads torch."""


@cli.app.command("doctor", rich_help_panel=cli.MODELS)
def doctor(
    model: cli.Model,
    data: cli.BatchData = "random",
    weights: cli.Weights = None,
    model_arg: cli.ModelArguments = None,
    samples: cli.Samples = 8,
    tokens: cli.Tokens = 32,
    trained: Annotated[
        bool | None, Option("--trained/--fresh", help="Whether MODEL is trained; by default its norm layers show it.")
    ] = None,
    jacobian: Annotated[bool, Option("--jacobian", help="Also measure kappa(J) of every head; minutes.")] = False,
    against: Annotated[
        Path | None, cli.checkpoint_option(help="Second checkpoint of MODEL: show what changed.")
    ] = None,
    seed: cli.Seed = 0,
    json: Annotated[bool, Option("--json", help="Print JSON instead of text.")] = False,
    output: cli.JsonFile = None,
    html: cli.HtmlFile = None,
    force: cli.Force = False,
) -> None:
    """Say what is wrong with the attention of MODEL, and which line of code fixes it; seconds.

    MODEL may also be a folder that save_pretrained wrote, for what its weights alone say, or the monitor.jsonl of a
    run, for its alarms.
    """
    cli.check_outputs(output, html, force=force)
    path = Path(model)
    if path.suffix == ".jsonl" or (path.is_dir() and (path / "monitor.jsonl").is_file()):
        _replay(path, json=json, output=output, html=html)
        return
    if path.is_dir() and (path / "config.json").is_file():
        model, data = f"hf:{model}", "none"
    elif path.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar") and path.is_file():
        other = "" if against is None else f" --against {against}"
        raise cli.OptionError(
            f"{model} holds weights, and which rows of them are heads is known for a model only; type "
            f"wellcond doctor MODEL --weights {model}{other or ' --data none'}, where MODEL is the model that they "
            "are of, such as timm:vit_base_patch16_224 or hf:gpt2"
        )
    if against is not None and html is not None:
        raise cli.OptionError("--html: a comparison of two checkpoints has no page; leave it out, or give -o FILE")
    if against is not None:
        _compare(model, model_arg, weights, against, seed, json=json, output=output)
        return
    built, batch, said = _build(model, model_arg, weights, seed, data, samples, tokens)
    from wellcond.doctor.diagnose import diagnose

    found = diagnose(built, batch, trained=trained, jacobian=jacobian)
    found.run.update({name: f"{said[name]}: {found.run[name]}" for name in said if name in found.run})
    text = found.to_text(width=min(100, make_console().width))
    _tell(text, found.to_json(), found.to_html, json=json, output=output, html=html)


@cli.app.command("measure", rich_help_panel=cli.MODELS)
def measure(
    model: cli.Model,
    data: cli.BatchData = "random",
    layers: Annotated[
        str, Option(metavar="LIST", help="all, or positions in `wellcond inspect`, such as 0,5,11.")
    ] = "all",
    heads: Annotated[str, Option(metavar="LIST", help="all, or numbers of key/value heads such as 0,1.")] = "all",
    convention: Annotated[
        str, Option(metavar="NAME", help="wide (the Jacobian) or stack (the papers' matrix).")
    ] = "wide",
    samples: cli.Samples = 1,
    tokens: cli.Tokens = 32,
    weights: cli.Weights = None,
    model_arg: cli.ModelArguments = None,
    seed: cli.Seed = 0,
    output: cli.JsonFile = None,
    html: cli.HtmlFile = None,
    resume: Annotated[Path | None, Option(help="File that records every head; the same command resumes.")] = None,
    force: cli.Force = False,
) -> None:
    """Measure every head on an input: condition number of the Jacobian, attention entropy, a verdict.

    MODEL may also be the folder of a finished run: its last weights, on samples that it was evaluated on.
    """
    check_choice("convention", convention, CONVENTIONS)
    numbers = {"layers": read_numbers(layers, "--layers"), "heads": read_numbers(heads, "--heads")}
    cli.check_outputs(output, html, force=force)
    built, batch, said = _build(model, model_arg, weights, seed, data, samples, tokens)
    import wellcond.lab.nystrom  # noqa: F401  (its heads have an operator of their own)
    from wellcond.attention.find import scan_attention
    from wellcond.measurement.measure import measure

    try:
        found = measure(
            built, batch, **numbers, convention=convention, samples=samples, resume=resume,  # type: ignore[arg-type]
            progress=lambda heads: track(heads, "heads", console=make_console(stderr=True)), on_slow=_say_slow,
        )  # fmt: skip
    except WellcondError:
        raise
    except ValueError as error:
        raise cli.OptionError(f"--{error}") from error
    found.run.update({name: f"{said[name]}: {found.run[name]}" for name in said})
    refused = [f"not understood: {refusal}" for refusal in scan_attention(built).refusals]
    text = "\n".join([found.to_table(), summarise(found), *refused])
    _tell(text, found.to_json(), found.to_html, output=output, html=html)


def _say_slow(seconds: float) -> None:
    from wellcond.jacobian.problem import show_seconds

    echo(
        f"this is expected to take up to {show_seconds(seconds)}: --layers, --heads or fewer --tokens make that less, "
        "--resume FILE keeps what is measured if you interrupt it",
        err=True,
    )


def _build(
    spec: str, model_arg: list[str] | None, weights: Path | None, seed: int, source: str, samples: int, tokens: int
) -> tuple[nn.Module, Any, dict[str, str]]:
    """The model and its batch, and what they are; a mistake is reported before torch is loaded."""
    if (Path(spec) / "run.json").is_file():
        if model_arg or weights is not None or source != "random":
            raise cli.OptionError(f"{spec} is a run, with model, weights and data of its own; leave out other options")
        return _build_run(Path(spec), samples)
    described_model = {"model": cli.describe_spec(spec, model_arg, weights, seed)}
    if source == "none":
        return cli.build_loaded(spec, model_arg, weights, seed), None, described_model
    cli.check_batch_data(source)
    model = cli.build_loaded(spec, model_arg, weights, seed)
    from wellcond.cli.inputs import folder_of, make_batch

    batch, described = make_batch(model, source, samples=samples, tokens=tokens, seed=seed, folder=folder_of(spec))
    return model, batch, described_model | {"input": described}


def _build_run(folder: Path, samples: int) -> tuple[nn.Module, Any, dict[str, str]]:
    """The trained model of a run, on the first samples of its evaluation set."""
    from wellcond.lab.train.prepare import rebuild_run

    model, task, record = rebuild_run(folder)
    trained = f"{record['recipe']}, {record['method']}, seed {record['seed']}, step {record['progress']['step']}"
    evaluated = f"first {samples} of the evaluation set of {task.data.name}"
    return model, task.probe(samples), {"model": f"run {trained}", "input": evaluated}


def _replay(path: Path, *, json: bool, output: Path | None, html: Path | None) -> None:
    """The alarms of a run, from what its monitor wrote."""
    from wellcond.cli.watch import find_file
    from wellcond.training.alarms import Alarms
    from wellcond.training.heads_map import render_maps
    from wellcond.training.series import Series

    series = Series.read(find_file(path))
    alarms = Alarms.replay(series)
    steps = f"steps {series.steps[0]} to {series.steps[-1]}" if series.steps else "no step yet"
    counted = f"{len(alarms)} alarm{'' if len(alarms) == 1 else 's'}" if alarms else "no alarm"
    first = f"{path}: {len(series.steps)} readings of {series.num_heads} heads, {steps}: {counted}."
    content = to_json([alarm.to_dict() for alarm in alarms], indent=2)

    def page() -> str:
        return render_maps(series, alarms=alarms, title=str(path))

    _tell("\n\n".join([first, *map(str, alarms)]), content, page, json=json, output=output, html=html)


def _compare(
    model: str,
    model_arg: list[str] | None,
    weights: Path | None,
    against: Path,
    seed: int,
    *,
    json: bool,
    output: Path | None,
) -> None:
    """What changed between two checkpoints of a model."""
    first = cli.build_loaded(model, model_arg, weights, seed)
    second = cli.build_loaded(model, model_arg, against, seed)
    from wellcond.doctor.weights import compare_weights

    found = compare_weights(first, second)
    title = f"{cli.describe_spec(model, model_arg, weights, seed)} against {against.name}"
    text = f"{title}\n\n{found.to_text(width=min(100, make_console().width))}"
    _tell(text, to_json(found.to_dict(), indent=2), json=json, output=output)


def _tell(
    text: str,
    content: str,
    page: Callable[[], str] = str,
    *,
    json: bool = False,
    output: Path | None,
    html: Path | None = None,
) -> None:
    """Print text or JSON, and write JSON and the page where they are wanted."""
    if json:
        echo_json(content)
    else:
        echo(text)
    for path, make in ((output, lambda: content + "\n"), (html, page)):
        if path is not None:
            write_atomically(path, make())
            echo(f"wrote {path}", err=json)


def read_numbers(text: str, option: str) -> list[int] | None:
    """Numbers such as ``0,5,11``; None for ``all``."""
    if text.strip() == "all":
        return None
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise cli.OptionError(f"{option}: expected 'all' or numbers such as 0,5,11, found {text!r}") from error


def summarise(report: MeasurementReport) -> str:
    """The summary below a table: how many heads, their mean, the worst, and those that are dead."""
    rows = [(layer.name or "(model)", head) for layer in report.layers for head in layer.heads]
    dead = [f"{name} head {head.index}" for name, head in rows if head.dead]
    finite = [kappa for _, head in rows if not head.dead and math.isfinite(kappa := head.mean_kappa())]
    text = f"model: {report.run['model']}\ninput: {report.run['input']}\n"
    failed = sum(len(layer.failed) for layer in report.layers)
    layers = f"{len(report.layers)} attention layer{'' if len(report.layers) == 1 else 's'}"
    text += f"{len(rows)} heads of {layers}; {report.convention} Jacobian"
    text += f"; {failed} heads could not be measured" if failed else ""
    if report.conditioning is not None:
        text += f", conditioned by {report.conditioning.get('method')!r} (effective weights)"
    if finite:
        mean = geometric_mean(finite)
        text += f".\nkappa(J) of live heads: geometric mean {mean:.4g}, worst {max(finite):.4g}"
    named = f"{len(dead)} ({', '.join(dead[:12])}); their kappa(J) is not meaningful" if dead else "none"
    text += f".\ndead heads: {named}"
    unknown = sum(head.diagnosis is None for _, head in rows)
    return text + f"; {unknown} heads are not plain softmax attention and could not be diagnosed" * bool(unknown)
