"""`wellcond selftest`: whether a device gives the numbers of its machine's CPU; a report to send back."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from wellcond.cli import app as cli
from wellcond.cli.console import echo
from wellcond.errors import OptionError
from wellcond.files import to_json, write_atomically
from wellcond.version import __version__

if TYPE_CHECKING:
    import torch
    from torch import nn

Check = Callable[["torch.device"], dict[str, Any]]
CHECKS: dict[str, Check] = {}
KIND = "wellcond selftest"
STEPS = 10
"""Of each timed training."""
TOKENS = 64


class Skipped(Exception):
    """A check that this device has nothing to show for."""


class Differs(Exception):
    """Numbers of the device that are not those of the CPU."""


def check(function: Check) -> Check:
    """Add a check under the name of its function."""
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


@cli.app.command("selftest", rich_help_panel=cli.MODELS)
def selftest(
    device: Annotated[str, Option(metavar="DEVICE", help="Device to try: cuda, cuda:1, mps, xpu or cpu.")] = "cuda",
    output: Annotated[Path, Option("--output", "-o", help="JSON file to write; the text goes beside it.")] = Path(
        "wellcond-selftest.json"
    ),
    only: Annotated[list[str] | None, Option(metavar="CHECK", help="Run only this check; repeatable.")] = None,
    force: cli.Force = False,
) -> None:
    """Try kernels, waiting, bf16, compilation, memory and speed on DEVICE against this machine's CPU; five minutes.

    Writes a report without any data of yours, which you can send back: versions, the device's name, numbers.
    """
    cli.check_outputs(output, force=force, suffix=".json")
    text = output.with_suffix(".txt")
    cli.check_outputs(text, force=force)
    unknown = set(only or ()) - set(CHECKS)
    if unknown:
        raise OptionError(f"--only: expected some of {', '.join(CHECKS)}, found {', '.join(sorted(unknown))}")
    chosen = _device(device)
    report: dict[str, Any] = {"kind": KIND, "wellcond": __version__, **_machine(chosen), "checks": {}}
    names = [name for name in CHECKS if not only or name in only]
    for number, name in enumerate(names, start=1):
        echo(f"[{number}/{len(names)}] {name} ...", err=True)
        report["checks"][name] = found = _run(CHECKS[name], chosen)
        echo(f"      {found['status']}, {found['seconds']:.1f} s{_note(found)}", err=True)
        write_atomically(output, to_json(report))  # so that a crash of the driver leaves what was found before it
        write_atomically(text, _as_text(report))
    echo(_as_text(report))
    echo(f"report: {output} and {text}; please send both back")


def _device(name: str) -> torch.device:
    import torch

    try:
        chosen = torch.device(name)
        torch.zeros(1, device=chosen)
    except Exception as error:  # of many kinds: no driver, no such device, torch built without it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise OptionError(f"--device: expected one that works here, such as cpu, found {name!r}: {reason}") from error
    return chosen


def _machine(device: torch.device) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["capability"] = list(torch.cuda.get_device_capability(device))
    return found


def _run(function: Check, device: torch.device) -> dict[str, Any]:
    import torch

    begin = time.perf_counter()
    torch.manual_seed(0)
    try:
        found = {"status": "ok", **function(device)}
    except Skipped as reason:
        found = {"status": "skipped", "why": str(reason)}
    except Differs as difference:
        found = {"status": "DIFFERS", "why": str(difference)}
    except Exception as error:
        why = (str(error).strip().splitlines() or [""])[0][:300]
        found = {"status": "FAILED", "why": f"{type(error).__name__}: {why}"}
    return found | {"seconds": round(time.perf_counter() - begin, 2)}


def _note(found: dict[str, Any]) -> str:
    return f": {found['why']}" if "why" in found else ""


def _as_text(report: dict[str, Any]) -> str:
    lines = [f"{KIND} {report['wellcond']}, torch {report['torch']}, {report['device']} ({report['name']})", ""]
    for name, found in report["checks"].items():
        lines.append(f"{name:<18} {found['status']:<8} {found['seconds']:6.1f} s{_note(found)}")
        for key, value in found.items():
            if key not in ("status", "seconds", "why"):
                shown = f"{value:.4g}" if isinstance(value, float) else value
                lines.append(f"    {key}: {shown}")
    bad = sum(found["status"] not in ("ok", "skipped") for found in report["checks"].values())
    return "\n".join([*lines, "", f"{bad} of {len(report['checks'])} checks differ or failed" if bad else "all well"])


# What is tried


def _encoder(device: torch.device, dtype: Any = None, *, width: int = 128, depth: int = 2) -> nn.Module:
    """The same weights on every device."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        model = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    return model.to(device=device, dtype=dtype)


def _tokens(device: torch.device, dtype: Any = None, *, width: int = 128, length: int = TOKENS) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, length, width, generator=generator).to(device=device, dtype=dtype)


def _close(what: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """The largest difference, relative to the largest number expected.

    Raises: Differs if it is above the tolerance.
    """
    difference = (got.detach().double().cpu() - expected.detach().double().cpu()).abs().max()
    relative = float(difference / expected.detach().double().abs().max().clamp_min(1e-30))
    if not relative <= tolerance:
        raise Differs(f"{what}: {relative:.2g} away from the CPU's number, at most {tolerance:g} was expected")
    return relative


def _train(model: nn.Module, tokens: torch.Tensor, optimizer: Any, steps: int, after: Callable[[], None]) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
        after()


def _nothing() -> None:
    pass


@check
def weights(device: torch.device) -> dict[str, Any]:
    """Initialisation, correction and singular values are those of the CPU."""
    import torch

    import wellcond as wc

    found = {}
    both = [_encoder(one) for one in (torch.device("cpu"), device)]
    for method in ("orthogonal", "gaussian", "conditioned"):
        for model in both:
            wc.init_(model, method, generator=torch.Generator().manual_seed(2))
        expected, got = (wc.find_attention(model)[1].q.read() for model in both)
        found[f"init {method}"] = _close(f"init_ {method!r}", got, expected, 1e-4)
    for model in both:
        wc.condition_(model, "balanced")
    expected, got = (wc.find_attention(model)[1].q.read() for model in both)
    found["condition balanced"] = _close("condition_ 'balanced'", got, expected, 1e-3)
    return found


@check
def jacobian(device: torch.device) -> dict[str, Any]:
    """kappa(J) of a head is that of the CPU."""
    import torch

    import wellcond as wc

    numbers = []
    for one in (torch.device("cpu"), device):
        model = _encoder(one)
        report = wc.measure(model, _tokens(one)[:1, :8], jacobian=True, heads=[0])
        found = report.layers[0].heads[0].jacobian
        if found is None:
            raise Differs(f"the Jacobian of a head was not measured on {one}")
        numbers.append(found.sigma_max)
    return {"sigma max": _close("sigma_max(J)", torch.tensor(numbers[1]), torch.tensor(numbers[0]), 1e-3)}


@check
def kernels(device: torch.device) -> dict[str, Any]:
    """What the monitor sees of every backend bounds the exact largest logit."""
    import math

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import wellcond as wc

    cpu = torch.device("cpu")
    found: dict[str, Any] = {}
    fused = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    for backend in (SDPBackend.MATH, *fused):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{backend.name.lower()} {str(dtype).removeprefix('torch.')}"
            exact_model = _encoder(cpu, dtype).double()
            with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
                exact = wc.AttentionMonitor(exact_model, every=1, columns=["max_logit"], weights=False)
                exact_model.train()(_tokens(cpu, dtype).double())
            model = _encoder(device, dtype)
            monitor = wc.AttentionMonitor(model, every=1, columns=["max_logit"], weights=False)
            try:
                with sdpa_kernel(backend):
                    model(_tokens(device, dtype))
            except RuntimeError as error:
                found[name] = f"not here: {str(error).splitlines()[0][:80]}"
                continue
            finally:
                monitor.close()
                exact.close()
            first = next(iter(exact.max_logits()))
            got, expected = monitor.max_logits()[first].cpu(), exact.max_logits()[first]
            if bool(got.isnan().any()):
                found[name] = f"not seen: {monitor.not_seen[first]['max_logit']}"
                continue
            slack = 0.05 if dtype is torch.bfloat16 else 1e-3
            above = float((got - expected).max())
            if above > math.log(TOKENS) + slack or float((got - expected).min()) < -slack:
                raise Differs(f"{name}: the largest logit is {above:.3g} above the exact one")
            found[name] = f"at most {above:.3g} above the exact largest logit"
    return found


def _acting(model: nn.Module) -> tuple[Any, Any]:
    """An optimiser with everything that acts after its step."""
    import torch

    import wellcond as wc

    groups = wc.muon_groups(model)
    muon = wc.HeadMuon(groups, lr=1e-2)
    adamw = torch.optim.AdamW(groups.others, lr=1e-3)
    wc.QKRate(model, muon, 0.5)
    wc.QKClip(model, [muon, adamw], tau=0.5)
    wc.SpectralCap(model, [muon, adamw], w_max=1.0)
    return muon, adamw


@check
def acting(device: torch.device) -> dict[str, Any]:
    """One step of Muon by head with clip, cap and rate gives the CPU's weights."""
    import torch

    import wellcond as wc

    results = []
    for one in (torch.device("cpu"), device):
        model = _encoder(one)
        muon, adamw = _acting(model)
        model(_tokens(one)).square().mean().backward()
        muon.step()
        adamw.step()
        results.append([slot.read() for site in wc.find_attention(model) for slot in site.slots.values()])
    # Newton-Schulz runs in bfloat16 on a GPU.
    pairs = zip(results[1], results[0], strict=True)
    return {"weights": max(_close("weights after a step", got, expected, 5e-2) for got, expected in pairs)}


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@check
def waiting(device: torch.device) -> dict[str, Any]:
    """No step of the monitor, the clip, the cap or Muon makes the host wait for the device."""
    import torch

    import wellcond as wc

    if device.type != "cuda":
        raise Skipped("only CUDA reports where the host waits")
    model, tokens = _encoder(device), _tokens(device)
    muon, adamw = _acting(model)
    monitor = wc.AttentionMonitor(model, every=1, weights=False)

    def step() -> None:
        model(tokens).square().mean().backward()
        muon.step()
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()

    for _ in range(3):  # tables are sent to the device in the first step
        step()
        monitor.step()
    torch.cuda.synchronize(device)
    with _waiting_is_an_error():
        step()
    monitor.close()
    return {"waits in a step": 0}


@check
def bfloat16(device: torch.device) -> dict[str, Any]:
    """Training in bfloat16 with the clip stays finite, and heads below tau are untouched bit for bit."""
    import torch

    import wellcond as wc

    tokens = _tokens(device, torch.bfloat16)
    trained = []
    for tau in (None, 1e6):
        model = _encoder(device, torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        if tau is not None:
            wc.QKClip(model, optimizer, tau)
        _train(model, tokens, optimizer, 3, _nothing)
        trained.append(torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()]))
    if not bool(trained[0].isfinite().all()):
        raise Differs("weights are not finite after three steps")
    if not torch.equal(*trained):
        raise Differs("a clip that never acts changes the weights; kernels of this device may not repeat their numbers")
    return {"equal bit for bit": True}


@check
def compilation(device: torch.device) -> dict[str, Any]:
    """A compiled conditioned model computes what it does eagerly."""
    import torch

    import wellcond as wc

    model, tokens = wc.condition_(_encoder(device, depth=1), "balanced"), _tokens(device)
    with torch.no_grad():
        expected = model(tokens)
        got = torch.compile(model)(tokens)
    return {"output": _close("output", got, expected, 1e-3)}


@check
def memory(device: torch.device) -> dict[str, Any]:
    """What the monitor and the clip add to the peak of a step."""
    import torch

    import wellcond as wc

    if device.type != "cuda":
        raise Skipped("only CUDA counts the memory of a step")
    peaks = {}
    for name in ("plain", "monitor", "clip"):
        model, tokens = _encoder(device), _tokens(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        monitor = wc.AttentionMonitor(model, every=1) if name == "monitor" else None
        if name == "clip":
            wc.QKClip(model, optimizer)
        torch.cuda.reset_peak_memory_stats(device)
        _train(model, tokens, optimizer, 3, _nothing if monitor is None else monitor.step)
        peaks[name] = torch.cuda.max_memory_allocated(device) / 2**20
    return {f"{name} (MiB)": peak for name, peak in peaks.items()}


@check
def speed(device: torch.device) -> dict[str, Any]:
    """Steps with the monitor, the clip, the cap and Muon by head, relative to AdamW or Muon alone."""
    import torch

    import wellcond as wc

    # A CPU shows whether it runs; only of a GPU that has enough to do the ratios mean something.
    width, depth, length = (128, 2, TOKENS) if device.type == "cpu" else (768, 6, 512)
    found: dict[str, Any] = {"width": width, "layers": depth, "tokens": length}

    def seconds(name: str) -> float:
        model = _encoder(device, width=width, depth=depth)
        tokens = _tokens(device, width=width, length=length)
        after = _nothing
        if name.startswith("muon"):
            groups = wc.muon_groups(model, "fused" if name == "muon fused" else "each")
            optimizer: Any = wc.HeadMuon(groups)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if name.startswith("monitor"):
            after = wc.AttentionMonitor(model, every=int(name.split()[-1])).step
        if name == "clip":
            wc.QKClip(model, optimizer)
        if name == "cap":
            wc.SpectralCap(model, optimizer, w_max=10.0)
        _train(model, tokens, optimizer, 3, after)
        _wait(device)
        begin = time.perf_counter()
        _train(model, tokens, optimizer, STEPS, after)
        _wait(device)
        return (time.perf_counter() - begin) / STEPS

    plain = min(seconds("plain") for _ in range(2))
    fused = min(seconds("muon fused") for _ in range(2))
    found["plain step (ms)"], found["muon step (ms)"] = 1e3 * plain, 1e3 * fused
    for name, base in (("monitor every 50", plain), ("monitor every 1", plain), ("clip", plain), ("cap", plain)):
        found[f"{name} (ratio)"] = min(seconds(name) for _ in range(2)) / base
    found["muon by head (ratio)"] = min(seconds("muon by head") for _ in range(2)) / fused
    return found


def _wait(device: torch.device) -> None:
    import torch

    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
