r"""The Jacobian of any attention, plain or not, through the module's own forward pass.

    f(W_q, W_k, W_v) = what W_O reads from the heads of one group, (g, tokens, dv)

with every other weight of the module fixed. J v is forward-mode differentiation and J^T u reverse-mode; the two are
independent of each other, so that <u, J v> = <J^T u, v> is a real test of both. Where it fails, J is what reverse mode
says, as in training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.autograd import forward_ad

from wellcond.attention.record import ROLES
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.errors import ReplayError, WeightError
from wellcond.jacobian.capture.align import is_map, tolerance
from wellcond.jacobian.capture.attention import CapturedAttention
from wellcond.jacobian.operator import GramOperator, JacobianOperator, Side
from wellcond.jacobian.ranks import RankBound
from wellcond.jacobian.replica import BatchAxis, Replica, as_double, batch_axis
from wellcond.linalg.spectrum import numerical_rank

LARGEST_BATCH = 32
BATCH_BYTES = 2**27
ADJOINT = 1e-9
"""<u, J v> = <J^T u, v>, up to rounding, relative to the lengths of the vectors."""


@cache
def _load_forward_mode() -> None:
    """The first dual number makes torch script its decompositions, of which it then warns."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


class Products:
    """J of `function` at `weights`; columns are the weights in order, each flattened as its transpose, row by row."""

    def __init__(
        self, function: Callable[..., Tensor], weights: tuple[Tensor, ...], size: int, batch_size: int
    ) -> None:
        """Of a function with `size` outputs; `batch_size` products J^T u are computed together."""
        self.function, self.weights, self.size, self.batch_size = function, weights, size, batch_size
        self.num_parameters = sum(w.numel() for w in weights)
        self._in_batches = True

    @cached_property
    def _recorded(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Weights and output with the graph between them."""
        with torch.enable_grad():
            leaves = tuple(w.clone().requires_grad_(True) for w in self.weights)
            return leaves, self.function(*leaves)

    @cached_property
    def _forward_mode(self) -> bool:
        """Whether forward mode differentiates what reverse mode does, which is what training sees.

        An operation may have no forward-mode derivative, and forward mode goes through what a module computes under
        `torch.no_grad`, where reverse mode stops.
        """
        # NaN and infinity have no mode that is right: they are left to whoever reads the products.
        return self._has_forward_mode and not self.adjoint_error() > ADJOINT

    @cached_property
    def _has_forward_mode(self) -> bool:
        try:
            self._jvp_forward(tuple(torch.zeros_like(w) for w in self.weights))
        except (NotImplementedError, RuntimeError):  # any other fault shows in reverse mode, which is then taken
            return False
        return True

    def adjoint_error(self, generator: torch.Generator | None = None) -> float:
        """|<u, J v> - <J^T u, v>| / (|u| |J v| + |J^T u| |v|) for random u and v: rounding, if all is well.

        J v is in forward mode wherever there is one, independent of the reverse mode of J^T u.
        """
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        u = torch.randn(self.size, dtype=torch.float64, generator=generator)
        v = torch.randn(self.num_parameters, dtype=torch.float64, generator=generator)
        push = self._jvp_forward if self._has_forward_mode else self._jvp_reverse
        pushed, pulled = push(self.unflatten(v)), self.vjp(u)
        size = float(u.norm() * pushed.norm() + pulled.norm() * v.norm())
        return 0.0 if size == 0 else abs(float(u @ pushed - pulled @ v)) / size

    def vjp(self, u: Tensor) -> Tensor:
        """J^T u."""
        leaves, output = self._recorded
        # A weight that does not matter (the queries of a single token) has no path to the output.
        return self.flatten(*_grad(output, leaves, u.view_as(output)))

    def jvp(self, v: Tensor) -> Tensor:
        """J v."""
        tangents = self.unflatten(v)
        return self._jvp_forward(tangents) if self._forward_mode else self._jvp_reverse(tangents)

    def _jvp_forward(self, tangents: tuple[Tensor, ...]) -> Tensor:
        _load_forward_mode()
        with forward_ad.dual_level(), torch.no_grad():
            duals = [forward_ad.make_dual(w, t) for w, t in zip(self.weights, tangents, strict=True)]
            output = self.function(*duals)
            tangent = forward_ad.unpack_dual(output).tangent
            return torch.zeros(self.size, dtype=torch.float64) if tangent is None else tangent.flatten()

    def _jvp_reverse(self, tangents: tuple[Tensor, ...]) -> Tensor:
        """J v = d<J^T u, v>/du: reverse mode twice."""
        with torch.enable_grad():
            leaves = tuple(w.clone().requires_grad_(True) for w in self.weights)
            output = self.function(*leaves)
            u = torch.zeros_like(output, requires_grad=True)
            pulled = _grad(output, leaves, u, create_graph=True)
            total = torch.stack([(p * t).sum() for p, t in zip(pulled, tangents, strict=True)]).sum()
        return _grad(total, (u,), None)[0].flatten()

    def vjps(self, covectors: Tensor) -> Tensor:
        """J^T u for many u at a time: (count, p) from (count, n)."""
        found = torch.empty(len(covectors), self.num_parameters, dtype=torch.float64)
        for some, into in zip(covectors.split(self.batch_size), found.split(self.batch_size), strict=True):
            if self._in_batches:
                try:
                    into.copy_(self._pull(some))
                    continue
                except (NotImplementedError, RuntimeError, ValueError):
                    self._in_batches = False  # an operation of this module cannot be batched (or must fail by itself)
            into.copy_(torch.stack([self.vjp(covector) for covector in some]))
        return found

    def _pull(self, covectors: Tensor) -> Tensor:
        leaves, output = self._recorded
        if not output.requires_grad:
            return torch.zeros(len(covectors), self.num_parameters, dtype=torch.float64)
        pulled = torch.autograd.grad(
            output,
            leaves,
            covectors.view(-1, *output.shape),
            retain_graph=True,
            is_grads_batched=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return torch.cat([w.mT.reshape(len(covectors), -1) for w in pulled], dim=1)

    def flatten(self, *weights: Tensor) -> Tensor:
        """Weights as one vector (p,), in the order of the columns."""
        return torch.cat([w.mT.reshape(-1) for w in weights])

    def unflatten(self, vector: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `flatten`."""
        parts = vector.split([w.numel() for w in self.weights])
        return tuple(part.view(w.mT.shape).mT for part, w in zip(parts, self.weights, strict=True))


def _grad(
    output: Tensor, inputs: tuple[Tensor, ...], weight: Tensor | None, *, create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Gradients; zero where no path leads from an input to the output."""
    if not output.requires_grad:
        return tuple(torch.zeros_like(w) for w in inputs)
    return torch.autograd.grad(
        output, inputs, weight, retain_graph=True, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )


def num_samples(captured: CapturedAttention) -> int:
    """Samples (or windows) that a captured call of an attention, plain or not, was given at once."""
    return _batch_of(captured).count


def _batch_of(captured: CapturedAttention) -> BatchAxis:
    assert captured.call is not None
    seen = [tokens.shape[1] for tokens in (captured.x, captured.memory) if tokens is not None]
    return batch_axis(captured.site, captured.call, seen)


def _close(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and bool((mine - theirs).norm() <= 1e-9 * theirs.norm())


class ModuleJacobian(JacobianOperator):
    """The query heads of one key/value head as a function of their weights, whatever the attention does with them.

    Rows of the Jacobian are ordered (query head, token, o), over all tokens of the captured call; columns Q, K, V, each
    flattened as the D x d matrix row by row (Q per query head), as in `dense_jacobian`. Under talking heads the weights
    act on the other heads too; the output is that of this group alone. Where there is no W_O and the module mixes the
    heads before it returns, the output is all that it returns, (1, tokens, width). Everything is float64 on the CPU.

    Example:
        >>> from torch import nn
        >>> from wellcond.jacobian.capture import capture_attention
        >>> x = torch.randn(1, 5, 8)
        >>> [captured] = capture_attention(nn.MultiheadAttention(8, 2, batch_first=True), (x, x, x))
        >>> head = ModuleJacobian(captured, 0)
        >>> head.shape, head.adjoint_error() < 1e-10
        ((20, 96), True)
    """

    def __init__(
        self,
        captured: CapturedAttention,
        kv_head: int = 0,
        *,
        samples: Sequence[int] | None = None,
        alone: bool = False,
        query_head: int | None = None,
    ) -> None:
        """Copy the module of a captured call, and check that the copy gives what the model gave.

        Args:
            captured: the attention and its call.
            kv_head: number of the key/value head.
            samples: only the outputs of these samples of the call (`num_samples`); all by default. Where the module
                gives the same for them by themselves, it is run on them only.
            alone: run it on them only in any case: attention that depends on the rest of the batch then gives other
                outputs than in it.
            query_head: one of the query heads by itself.

        Raises:
            ValueError: the attention was not called.
            IndexError: no such head or sample.
            WeightError: the weights changed since the capture.
            UnsupportedLayoutError: where the heads leave the module is not known.
            CopyError: the module cannot be copied.
            ReplayError: the copy gives something else, for instance because it keeps state between calls.
        """
        if captured.call is None:
            raise ValueError(f"{captured.site.name}: {captured.why_not_plain}")
        if not 0 <= kv_head < captured.site.num_kv_heads:
            raise IndexError(
                f"{captured.site.name}: expected a key/value head below {captured.site.num_kv_heads}, got {kv_head}"
            )
        captured.check_weights()
        self.captured, self.kv_head = captured, kv_head
        self._replica = Replica(captured.site, captured.call)
        self.group = group = captured.query_heads(kv_head, query_head)
        self._rows = [self.site.by_role("query").rows[group]]
        self._rows += [self.site.by_role(role).rows[kv_head : kv_head + 1] for role in ("key", "value")]
        self._columns = self._replica.columns[group]
        heads = [self._rows_of(slot, rows) for slot, rows in zip(self._slots, self._rows, strict=True)]
        self.w_q, self.w_k, self.w_v = heads[0], heads[1][0], heads[2][0]
        self.samples: list[int] | None = None
        self._batch, self._kept = _batch_of(captured), None  # type: tuple[BatchAxis, Tensor | None]
        with torch.no_grad():
            everything = self._all_heads(self.w_q, self.w_k, self.w_v)
        self._check_replay(everything)
        if samples is not None:
            everything = self._choose(list(samples), everything, alone)
        self.num_rows = everything.shape[0]
        if not self._heads_are_apart(everything):
            self._columns = torch.arange(everything.shape[1])[None]

    @torch.no_grad()
    def _choose(self, samples: list[int], everything: Tensor, alone: bool) -> Tensor:
        """Take these samples out of the call; returns what W_O reads of them."""
        outside = [sample for sample in samples if not 0 <= sample < self._batch.count]
        if outside:
            raise IndexError(f"{self.site.name}: expected a sample below {self._batch.count}, got {outside[0]}")
        if samples == list(range(self._batch.count)):
            return everything
        whole, self.samples = self._replica, samples
        # As many samples as tokens: the shape does not say which axis is which, but running it does.
        for batch in (self._batch, BatchAxis(1 - self._batch.axis, self._batch.count)):
            self._replica = whole.only(samples, batch)
            try:
                found = self._all_heads(self.w_q, self.w_k, self.w_v)
            except Exception:  # an arbitrary forward pass: windows of one image may come with masks for all of them
                if alone:
                    raise
                continue
            rows = batch.rows(samples, len(everything))
            if alone or (rows is not None and _close(found, everything[rows])):
                self._batch = batch
                return found
        rows = self._batch.rows(samples, len(everything))
        self._replica, self._kept = whole, rows
        return everything if rows is None else everything[rows]

    @property
    def site(self) -> AttentionSite:
        """The attention."""
        return self.captured.site

    @property
    def _slots(self) -> list[Slot]:
        return [self.site.by_role(role) for role in ROLES]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs g * tokens * dv, of the call or of the samples chosen, and the entries of W_q, W_k and W_v."""
        return self.num_rows * self._columns.numel(), sum(w.numel() for w in self._weights)

    @property
    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.w_q, self.w_k, self.w_v

    def gram(self, side: Side = "outputs") -> GramOperator:
        """J J^T, or the smaller of J J^T and J^T J, from J itself."""
        n, p = self.shape
        size = n if side == "outputs" else min(n, p)
        return GramOperator(size, lambda u: self.matvec(self.rmatvec(u)), lambda: self._squared_on(size), scratch=n * p)

    def _squared_on(self, size: int) -> Tensor:
        jacobian = self.as_matrix()
        return jacobian @ jacobian.T if size == len(jacobian) else jacobian.T @ jacobian

    def rank_bound(self) -> RankBound:
        """What null directions any attention has leave: weights outside the span of what they multiply change nothing.

        It is an upper bound, which an attention need not reach.
        """
        ranks, missing = [], 0
        for role, slot, weight in zip(ROLES, self._slots, self._weights, strict=True):
            ranks.append(self._token_rank(role, slot))
            missing += (weight.numel() // slot.in_features) * (slot.in_features - ranks[-1])
        outputs, seen = self.shape[0], self.shape[1] - missing
        named = f"outside the span of the tokens: {missing}" if missing and seen < outputs else ""
        return RankBound(min(outputs, seen), named, ranks[1])

    def _token_rank(self, role: str, slot: Slot) -> int:
        call = self.captured.call
        assert call is not None
        tokens = call.inputs.get(role)
        if tokens is None:  # used by other means than one call of its module: nothing is known
            return slot.in_features
        batch = self._batch
        if self.samples is not None and tokens.dim() > batch.axis and tokens.shape[batch.axis] == batch.count:
            tokens = tokens.index_select(batch.axis, torch.tensor(self.samples, device=tokens.device))
        tokens = tokens.movedim(1, -1) if is_map(slot, tokens) else tokens
        return numerical_rank(as_double(tokens).reshape(-1, slot.in_features))

    def _rows_of(self, slot: Slot, rows: Tensor) -> Tensor:
        return slot.as_matrix(self._replica.weight(slot))[rows].clone()

    @property
    def columns(self) -> Tensor:
        """Columns of each query head of the group in what W_O reads, (g, dv)."""
        return self._columns

    def stored(self, slot: Slot) -> Tensor:
        """The copied weight that holds a slot: the very tensor that `run` multiplies."""
        return self._replica.stored(slot)

    def run(self) -> Tensor:
        """What W_O reads (tokens, width), with the stored weights."""
        everything = self._replica.heads({})
        return everything if self._kept is None else everything[self._kept]

    def _all_heads(self, *heads: Tensor) -> Tensor:
        """What W_O reads (tokens, width) with these rows in place of the stored ones."""
        weights: dict[str, Tensor] = {}
        for slot, rows, head in zip(self._slots, self._rows, heads, strict=True):
            key = self._replica.weight_key(slot)
            stored = weights.get(key, self._replica.weight(slot))
            matrix = slot.as_matrix(stored).index_copy(0, rows.flatten(), head.reshape(rows.numel(), -1))
            weights[key] = slot.with_matrix(stored, matrix)
        everything = self._replica.heads(weights)
        return everything if self._kept is None else everything[self._kept]

    def output(self, w_q: Tensor | None = None, w_k: Tensor | None = None, w_v: Tensor | None = None) -> Tensor:
        """Output (g, tokens, dv) with other weights (g, d, D), (d, E), (dv, E); the captured ones where None."""
        given = (w_q, w_k, w_v)
        heads = [own if new is None else new for own, new in zip(self._weights, given, strict=True)]
        return self._all_heads(*heads)[:, self._columns].transpose(0, 1)

    @torch.no_grad()
    def _heads_are_apart(self, everything: Tensor) -> bool:
        """Whether the columns of this group can be taken out of what the module returns, where there is no W_O to ask.

        Another value of W_v must change these columns and no others.
        """
        if self._replica.reads_o or self._replica.has_own_o:
            return True
        if everything.shape[1] != self._replica.width:
            return False
        other = self._all_heads(self.w_q, self.w_k, self.w_v + 1.0)
        changed = (other - everything).norm(dim=0) > 1e-9 * other.norm()
        own = torch.zeros_like(changed).index_fill(0, self._columns.flatten(), True)
        return not bool((changed & ~own).any())

    def _check_replay(self, everything: Tensor) -> None:
        call, slot = self.captured.call, self.site.o
        assert call is not None
        found = everything
        if call.heads is not None:
            expected = call.heads
        else:
            expected = call.output
            if self._replica.has_own_o:  # the copy has the identity in the place of W_O
                assert slot is not None
                found = everything @ as_double(slot.as_matrix(getattr(slot.owner, slot.weight_name))).T
                bias = slot.read_bias()
                found = found if bias is None else found + as_double(bias)
        expected = self._replica.as_rows(as_double(expected))
        off = float((found - expected).norm()) / max(float(expected.norm()), torch.finfo(torch.float64).tiny)
        if not off <= 10 * tolerance(self.captured.dtype):
            raise ReplayError(
                f"{self.site.name}: run again in float64, its module gives something else than in the model (relative "
                f"difference {off:.1e}); it depends on more than its arguments and weights"
            )

    @cached_property
    def _products(self) -> Products:
        return Products(self.output, self._weights, self.shape[0], self.batch_size)

    def rmatvec(self, u: Tensor) -> Tensor:
        """J^T u, by reverse-mode differentiation."""
        return self._products.vjp(u)

    def matvec(self, v: Tensor) -> Tensor:
        """J v, by forward-mode differentiation."""
        return self._products.jvp(v)

    @property
    def batch_size(self) -> int:
        """Products that are computed together: the attention maps of all of them fit in `BATCH_BYTES`."""
        rows = self.num_rows if self._kept is None else self._batch.count * self.num_rows // len(self.samples or [0])
        maps = 8 * self.site.num_heads * rows * max(rows, self._replica.width)
        return max(1, min(LARGEST_BATCH, BATCH_BYTES // maps))

    def adjoint_error(self, generator: torch.Generator | None = None) -> float:
        """How far J v in forward mode and J^T u in reverse mode are from adjoint: rounding, if all is well."""
        return self._products.adjoint_error(generator)

    def as_matrix(self) -> Tensor:
        """J (n, p), by reverse passes for all outputs.

        Raises: WeightError if it has NaN or infinite entries.
        """
        outputs = self.shape[0]
        jacobian = torch.empty(self.shape, dtype=torch.float64)
        for first in range(0, outputs, self.batch_size):
            rows = jacobian[first : first + self.batch_size]
            units = torch.zeros(len(rows), outputs, dtype=torch.float64)
            units.diagonal(first).fill_(1.0)
            rows.copy_(self._products.vjps(units))
        if not bool(torch.isfinite(jacobian).all()):
            raise WeightError(f"{self.site.name}: its derivative has NaN or infinite entries")
        return jacobian
