"""kappa(X) and kappa(J) beside a training, one head at a time in turn, within a share of the training time."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.record import Field, kappa_of_tokens, record
from wellcond.attention.sharding import is_sharded
from wellcond.attention.site import AttentionSite
from wellcond.errors import WellcondError
from wellcond.measurement.measure import measure

TOKENS: tuple[Field, ...] = ("tokens",)
JACOBIAN_COLUMNS = ("kappa_x", "kappa_jacobian")
MOST_TOKENS = 256


class OneHeadAtATime:
    """Measures the next head when the time for it was earned."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[AttentionSite],
        share: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin the clock.

        Raises: ValueError for a model that several processes hold together.
        """
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if is_sharded(model) or (distributed and torch.distributed.get_world_size() > 1):
            raise ValueError("jacobian: this is for one process; ConditionTracker measures where there are several")
        self.model, self.sites, self.share, self.clock = model, list(sites), share, clock
        self.begun, self.spent, self.expected = clock(), 0.0, 0.0
        heads = [(site, head) for site in self.sites for head in range(site.num_kv_heads)]
        self._heads = itertools.cycle(heads)

    def measure(self, batch: Any) -> dict[str, Tensor]:
        """Both columns with the numbers of one head, all others NaN; nothing where the time was not earned yet."""
        begun = self.clock()
        training = begun - self.begun - self.spent
        if self.spent + self.expected > self.share * training:
            return {}
        site, head = next(self._heads)
        count = sum(one.num_heads for one in self.sites)
        columns = {name: torch.full((count,), math.nan, dtype=torch.float64) for name in JACOBIAN_COLUMNS}
        first = sum(one.num_heads for one in itertools.takewhile(lambda one: one is not site, self.sites))
        group = site.num_heads // site.num_kv_heads
        rows = slice(first + head * group, first + (head + 1) * group)
        columns["kappa_x"][first : first + site.num_heads] = self._kappa_of_tokens(site, batch)
        try:
            report = measure(self.model, batch, sites=[site], heads=[head], samples=1, kappa="pseudo")
            columns["kappa_jacobian"][rows] = report.layers[0].heads[0].mean_kappa("pseudo")
        except (WellcondError, IndexError):  # a head that cannot be measured stays NaN, and its turn is over
            pass
        self.expected = self.clock() - begun
        self.spent += self.expected
        return columns

    def _kappa_of_tokens(self, site: AttentionSite, batch: Any) -> float:
        """Of the first sample, over distinct tokens and non-zero singular values; NaN where tokens were not seen."""
        rows = record(self.model, batch, [site], TOKENS).sites[0].samples()
        if rows is None or not bool(rows[0, :MOST_TOKENS].isfinite().all()):
            return math.nan
        return kappa_of_tokens(rows[0, :MOST_TOKENS])
