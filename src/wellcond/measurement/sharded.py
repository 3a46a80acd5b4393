"""`measure` where the weights of a model are sharded over ranks (FSDP2, tensor parallelism).

Every process runs the model on the batch, because that is how FSDP2 and tensor parallelism work. Then one attention
after the other is gathered into a plain module, and the first process measures that on what it was called with. So a
process needs room for one whole attention, never for a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.evaluation import Arguments, plain_class, plain_copy
from wellcond.attention.names import HEADS
from wellcond.attention.record import NOT_CALLED, Field, record
from wellcond.attention.sharding import full_tensor, is_distributed
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import class_without_conditioning, corrections_of
from wellcond.conditioning.attach import conditioned_class
from wellcond.errors import UnsupportedLayoutError, WellcondError
from wellcond.measurement.records import NUMERICAL, LayerReport

ARGUMENTS: tuple[Field, ...] = ("arguments",)


def measure_sharded(
    model: nn.Module,
    batch: Any,
    sites: Sequence[AttentionSite],
    measure_whole: Callable[[AttentionSite, Arguments], LayerReport],
) -> list[LayerReport]:
    """What `measure_whole` says of each site in a plain copy and of what it was called with.

    Every process must call it, and gets what the first one found.

    Raises: WellcondError on every process, if something went wrong on the first or not one head could be measured.
    """
    stored = {id(site): site.q.parameter.dtype for site in sites}

    def copied_in_full(site: AttentionSite, tensor: Tensor) -> Tensor:
        # FSDP2 may compute in another precision than it stores, which is the one that is measured.
        dtype = stored[id(site)] if tensor.is_floating_point() else tensor.dtype
        return full_tensor(tensor).to("cpu", dtype, copy=True)

    found = record(model, batch, sites, ARGUMENTS, copied=copied_in_full)
    rows: list[LayerReport] = []
    problem: str | None = None
    for seen in found.sites:
        site = seen.site
        _check_head_count(site)
        copied = site.on(plain_copy(site.module, class_of=_plain_or_conditioned_class))
        if torch.distributed.get_rank() != 0 or problem is not None:
            continue
        try:
            if not seen.called:
                raise WellcondError(NOT_CALLED)
            rows.append(measure_whole(copied, Arguments(seen.args, seen.kwargs)))
        except NUMERICAL as error:
            sizes = (site.num_heads, site.num_kv_heads, site.head_dim)
            rows.append(LayerReport(site.name, site.kind, *sizes, 0, (), str(error).splitlines()[0]))
        except Exception as error:  # the others wait: they have to hear of anything
            problem = f"{site.name}: {type(error).__name__}: {error}"
    rows, problem = decided_by_first((rows, problem))
    if problem is None and all(row.problem for row in rows):
        problem = f"no head could be measured: {rows[0].name}: {rows[0].problem}"
    if problem is not None:
        raise WellcondError(problem)
    return rows


def decided_by_first(value: Any) -> Any:
    """What the first process has, on every process."""
    holder = [value]
    torch.distributed.broadcast_object_list(holder, src=0)
    return holder[0]


def _plain_or_conditioned_class(module: nn.Module) -> type[nn.Module]:
    plain, conditioned = plain_class(module), tuple(sorted(corrections_of(module)))
    return conditioned_class(class_without_conditioning(plain), conditioned) if conditioned else plain


def _check_head_count(site: AttentionSite) -> None:
    """Refuse a module that counts the heads of its own process only: with whole weights it computes nonsense."""
    if not is_distributed(site.q.parameter):
        return
    counts = {name: getattr(site.module, name, site.num_heads) for name in HEADS}
    for name, count in counts.items():
        if isinstance(count, int) and count not in (site.num_heads, site.num_kv_heads):
            raise UnsupportedLayoutError(
                site.name,
                f"it says {name}={count} while its weights hold {site.num_heads} heads (changed for tensor "
                "parallelism?); it cannot be measured with whole weights.",
                class_name=type(site.module).__name__,
            )
