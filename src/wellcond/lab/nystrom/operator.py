"""The Jacobian of a Nystrom head, and the heads of a captured call of Hugging Face's Nystrom attention.

J is in orthonormal coordinates, without directions that are known to change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import scipy.linalg
import torch
from torch import Tensor

from wellcond.attention.kernels import map_statistics
from wellcond.jacobian.capture import CapturedAttention
from wellcond.jacobian.ends import from_the_right
from wellcond.jacobian.module import ModuleJacobian
from wellcond.jacobian.operator import GramOperator, Hints, JacobianOperator, RankBound, Side, TriangleHint
from wellcond.jacobian.select import ApproximatedMap, SelectedOperator, register_operator
from wellcond.lab.nystrom.head import Moving, NystromHead, Reach
from wellcond.linalg.spectrum import resolve_rank, row_space

TOKENS_AT_A_TIME = 64
MASKED = -1e9
LARGEST_MAP = 256  # rows of the exact attention map that are looked at


@dataclass(frozen=True, eq=False)
class NystromJacobian(JacobianOperator):
    """One head on one sample."""

    head: NystromHead
    token_rtol: float | None = None
    """Singular values of the tokens up to this share of the largest count as zero; by default, rounding of float64."""

    @property
    def num_outputs(self) -> int:
        """N dv."""
        return self.head.v.numel()

    @property
    def shape(self) -> tuple[int, int]:
        """N dv outputs, and the weights of the head."""
        return self.num_outputs, (2 * self.head.w_q.shape[0] + self.head.w_v.shape[0]) * self.head.x.shape[1]

    @cached_property
    def span(self) -> Tensor:
        """Orthonormal basis (D, r) of what the tokens span."""
        return row_space(self.head.x, rtol=self.token_rtol)

    @cached_property
    def moving(self) -> Moving:
        """Coordinates of W_Q and W_K."""
        return Moving(self.head, self.span)

    @cached_property
    def reach(self) -> Reach:
        """Coordinates of the outputs beyond the range of T."""
        left, sigma = self._values
        return Reach(self.head, left[:, len(sigma) :])

    @cached_property
    def _values(self) -> tuple[Tensor, Tensor]:
        """U (N, N) and the singular values of T that are not zero, with J_V = T (x) I."""
        t = self._of_values
        left, sigma, _ = torch.linalg.svd(t)
        return left, sigma[: int(resolve_rank(sigma, tuple(t.shape)))]

    @cached_property
    def _of_values(self) -> Tensor:
        """T, in coordinates of the span of the tokens."""
        return self.head.linear_in_values(self.head.x @ self.span)

    @property
    def _num_values(self) -> int:
        return len(self._values[1]) * self.head.v.shape[1]

    def rank_bound(self) -> RankBound:
        """The rank that such a Jacobian has unless its numbers are special."""
        head, r = self.head, self.span.shape[1]
        per_token, width = 2 * head.w_q.shape[0] + head.w_v.shape[0], head.x.shape[1]
        rows, columns = self._num_values + self.reach.size, self._num_values + self.moving.size
        # Of directions that move B alone, landmarks pass on no more than (F Z beyond the range of T) (x) channels.
        idle = max(0, self.moving.num_b_only - self.reach.num_by_b)
        gauge, outside = self.moving.num_null, per_token * (width - r)
        unseen = per_token * width - outside - gauge - columns + idle
        names = []
        if columns - idle < rows:
            names += [f"gauge (W_Q E, -W_K E^T): {gauge}"]
            names += [f"outside the span of the tokens: {outside}"] if outside else []
            names += [f"weights that {head.num_landmarks} landmarks do not see: {unseen}"] if unseen else []
        elif rows < self.num_outputs:
            names += [f"outputs that {head.num_landmarks} landmarks cannot reach: {self.num_outputs - rows}"]
        return RankBound(min(rows, columns - idle), "; ".join(names), r)

    @cached_property
    def query_key_jacobian(self) -> Tensor:
        """J_Q and J_K in the coordinates of `moving`, (N, dv, columns)."""
        seen, moving = self.head.seen @ self.span, self.moving
        j_q, j_k = self.head.query_key_jacobian(seen @ moving.q.tokens, seen @ moving.k.tokens)
        found = j_q.new_empty(*j_q.shape[:2], moving.size)
        for into, some_q, some_k in zip(*(part.split(TOKENS_AT_A_TIME) for part in (found, j_q, j_k)), strict=True):
            into.flatten(0, 1).copy_(moving.take(some_q.flatten(0, 1), some_k.flatten(0, 1)))
        return found

    def _split(self) -> tuple[Tensor, Tensor, Tensor]:
        """S (x) I as a vector, and M_1 and M_2 beside and below it."""
        (left, sigma), dv = self._values, self.head.v.shape[1]
        moved = self.query_key_jacobian
        above = (left[:, : len(sigma)].T @ moved.flatten(1)).view(len(sigma) * dv, moved.shape[2])
        return sigma.repeat_interleave(dv), above, self.reach.rows_of(moved)

    def as_matrix(self) -> Tensor:
        """J in the coordinates that are left, of rows and columns."""
        values, above, below = self._split()
        beside = torch.cat([torch.diag(values), below.new_zeros(len(below), len(values))])
        return torch.cat([beside, torch.cat([above, below])], dim=1)

    @property
    def _value_map(self) -> Tensor:
        left, sigma = self._values
        return left[:, : len(sigma)] * sigma

    def matvec(self, v: Tensor) -> Tensor:
        """J v."""
        of_q, of_k, of_v = v.view(3, self.span.shape[0], -1)
        turned = [part.tokens.T @ (self.span.T @ of) for part, of in ((self.moving.q, of_q), (self.moving.k, of_k))]
        moved = self.query_key_jacobian.flatten(0, 1) @ self.moving.take(turned[0][None], turned[1][None])[0]
        return moved + (self._of_values @ (self.span.T @ of_v)).flatten()

    def rmatvec(self, u: Tensor) -> Tensor:
        """J^T u."""
        turned = self.moving.give(self.query_key_jacobian.flatten(0, 1).T @ u)
        of_q, of_k = (
            self.span @ (part.tokens @ of) for part, of in zip((self.moving.q, self.moving.k), turned, strict=True)
        )
        of_v = self.span @ (self._of_values.T @ u.view(self.head.v.shape))
        return torch.cat([part.flatten() for part in (of_q, of_k, of_v)])

    def gram(self, side: Side = "outputs") -> GramOperator:
        """J J^T of all outputs, or the smaller of both squares of J in the coordinates that are left."""
        # J_Q and J_K, what is left of them, and the same in the basis U.
        scratch = self.num_outputs * (2 * self.span.shape[1] * self.head.w_q.shape[0] + 2 * self.moving.size)
        if side == "outputs":
            return GramOperator(self.num_outputs, self._gram_product, self._output_gram, scratch=scratch)
        smaller = self._num_values + min(self.reach.size, self.moving.size)
        return GramOperator(
            smaller, self._gram_product, self._smaller_gram, scratch=scratch, factor_rows=self.num_outputs
        )

    def _smaller_gram(self) -> Tensor:
        jacobian = self.as_matrix()
        return jacobian @ jacobian.T if jacobian.shape[0] <= jacobian.shape[1] else jacobian.T @ jacobian

    @property
    def hints(self) -> Hints:
        """J is made triangular by QR of what W_Q and W_K move beyond the range of T."""
        build = lambda tolerance: make_triangle(*self._split(), tolerance)  # noqa: E731
        return Hints(triangle=TriangleHint(build, preferred=True))

    def _output_gram(self) -> Tensor:
        n, dv = self.head.v.shape
        moved = self.query_key_jacobian.flatten(0, 1)
        gram = moved @ moved.T
        gram.view(n, dv, n, dv).diagonal(dim1=1, dim2=3).add_((self._value_map @ self._value_map.T)[:, :, None])
        return gram

    def _gram_product(self, u: Tensor) -> Tensor:
        rows, moved, values = u.view(self.head.v.shape), self.query_key_jacobian.flatten(0, 1), self._value_map
        return moved @ (moved.T @ u) + (values @ (values.T @ rows)).flatten()

    def output(self) -> Tensor:
        """What W_O reads of this head, (N, dv)."""
        return self.head.output()


def make_triangle(values: Tensor, above: Tensor, below: Tensor, tolerance: float) -> tuple[Tensor, float]:
    """A triangle with the singular values of [S M_1; 0 M_2], S = diag(values).

    Directions that M_2 moves by no more than the tolerance are zero.
    """
    if len(below) >= below.shape[1]:
        below = torch.linalg.qr(below, mode="r").R
    dropped = 0.0
    square = from_the_right(below)[0] if len(below) < below.shape[1] else below
    if len(square) and not _is_regular(square, tolerance):
        # Pivoting tells how many directions M_2 has; QR alone does not.
        pivoted, order = scipy.linalg.qr(below.numpy(), mode="r", pivoting=True)
        rank = int((abs(pivoted.diagonal()) > tolerance).sum())
        dropped = float(scipy.linalg.norm(pivoted[rank:]))
        below = below.new_empty(rank, below.shape[1])
        below[:, torch.from_numpy(order).long()] = torch.from_numpy(pivoted[:rank])
    if len(below) < below.shape[1]:
        # M_2 = [0, R] Q by turning columns, and then [S (x) I, what Q leaves of M_1 above 0] likewise.
        free = below.shape[1] - len(below)
        below, above = from_the_right(below, above)
        wide = torch.cat([above[:, :free], torch.diag(values)], dim=1)
        corner, above = from_the_right(wide)[0], above[:, free:]
    else:
        corner = torch.diag(values)
    size, first = len(corner) + len(below), len(corner)
    entries = above.new_zeros(size, size)
    entries[:first, :first], entries[:first, first:], entries[first:, first:] = corner, above, below
    return entries, dropped


def _is_regular(square: Tensor, tolerance: float) -> bool:
    """Whether 1 / |R^-1|, by LAPACK's estimate, is well above the tolerance."""
    reciprocal, _ = scipy.linalg.lapack.dtrcon(square.numpy(), norm="1", uplo="U")
    return bool(reciprocal * square.abs().sum(0).max() > 10 * tolerance)


def _approximates(captured: CapturedAttention) -> bool:
    """With as many landmarks as tokens the module computes the softmax itself."""
    module: Any = captured.site.module
    return module.num_landmarks < module.seq_len


def nystrom_head(captured: CapturedAttention, index: int, sample: int) -> NystromHead | None:
    """One head on one sample by itself; None for another class or a mask of another shape."""
    site, call = captured.site, captured.call
    module: Any = site.module
    names = ("num_landmarks", "seq_len", "conv_kernel_size", "init_option")
    if site.kind != "nystrom" or captured.x is None or call is None or not all(hasattr(module, n) for n in names):
        return None
    x = captured.x[sample].detach().cpu().double()
    masks = _masks([*call.args[1:], *call.kwargs.values()], captured, sample)
    if masks is None or len(x) % module.num_landmarks:
        return None
    kernel = None
    if module.conv_kernel_size is not None:
        kernel = module.conv.weight.detach().cpu().double()[index].flatten()
    heads = []
    for number in range(site.num_heads):
        slots = [site.by_role(role) for role in ("query", "key", "value")]
        weights = [slot.read()[number].detach().cpu().double() for slot in slots]
        biases = [None if (b := slot.read_bias()) is None else b[number].detach().cpu().double() for slot in slots]
        heads.append(NystromHead(x, *weights, module.num_landmarks, *biases, **masks))  # type: ignore
    own = replace(heads.pop(index), kernel=kernel)
    if module.init_option != "original" or not heads:
        return own
    # All heads of the call share c, so that another head may decide it.
    return replace(own, column_sum=max(float(head.between.sum(0).max()) for head in heads))


def _masks(others: list[Any], captured: CapturedAttention, sample: int) -> dict[str, Tensor] | None:
    """Marks of tokens (L, N), 0 or 1, or numbers (L, 1, 1, N) that are added to logits; None for anything else."""
    assert captured.x is not None
    tensors, tokens = [value for value in others if isinstance(value, Tensor)], captured.x.shape[1]
    if not tensors:
        return {}
    if len(tensors) > 1 or tensors[0].shape[-1] != tokens:
        return None
    mask = tensors[0].detach().cpu().double()
    mask = mask[0 if len(mask) == 1 else sample]
    if mask.shape == (1, 1, tokens):
        return {"key_bias": mask[0, 0]}
    if mask.shape == (tokens,):
        return {"visible": mask, "key_bias": MASKED * (1 - mask)}
    return None


def nystrom_map(captured: CapturedAttention, index: int, sample: int = 0) -> ApproximatedMap | None:
    """The softmax P that a head approximates, and |F Z B - P| / |P| in the Frobenius norm.

    Of at most 256 query tokens at equal distances, padding left out; None where the masks are not known.
    """
    head = nystrom_head(captured, index, sample)
    if head is None:
        return None
    hidden = torch.zeros(len(head.x)) if head.key_bias is None else head.key_bias
    tokens = (hidden > MASKED / 2).nonzero().flatten()
    if not len(tokens):
        return None
    count = min(LARGEST_MAP, len(tokens))
    rows = tokens[torch.linspace(0, len(tokens) - 1, count).round().long()]
    p = (head.q[rows] @ head.k.T + hidden).softmax(-1)
    statistics = map_statistics(p, torch.full((count,), float(len(tokens))), own=p[torch.arange(count), rows])
    if not _approximates(captured):
        return ApproximatedMap(statistics, None)
    off = head.mixing[rows] @ head.from_landmarks - p
    return ApproximatedMap(statistics, float(off.norm() / p.norm()))


@register_operator("nystrom", approximated=nystrom_map)
def nystrom_operator(module: ModuleJacobian, biases: bool) -> SelectedOperator | None:
    """The structured operator of one head on one sample; None for biases, another class or several samples."""
    captured = module.captured
    if biases or len(module.samples) > 1 or not _approximates(captured):
        return None
    head = nystrom_head(captured, module.kv_head, module.samples[0])
    if head is None:
        return None
    # Layer-normed tokens have mean zero but for the model's own rounding, which must not count as a direction.
    rtol = None if captured.dtype == torch.float64 else 10 * torch.finfo(captured.dtype).eps
    operator = NystromJacobian(head, rtol)
    return SelectedOperator(operator, "structured: Nystrom attention")
