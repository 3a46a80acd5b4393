"""When lambda I on queries and keys turns attention into the identity."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wellcond.theory.statement import AbstractStatement, Hypothesis, all_hold, ours, settle


@dataclass(frozen=True, kw_only=True)
class Saturation(AbstractStatement):
    """The self-logit gap (the value) against the threshold from which a head is dead."""

    threshold: float

    @property
    def saturates(self) -> bool | None:
        """Whether the gap exceeds the threshold; None outside the hypotheses."""
        return None if self.value is None else self.value > self.threshold


def saturation(
    lam: float, *, head_dim: int, num_tokens: int, scale: float | None = None, strict: bool = True
) -> Saturation:
    r"""Rule of thumb for the softmax under lam I.

    .. math:: s \lambda^2 d > \ln N + 5

    For layer-normed tokens (entries of variance one) lam I on Q and K raises the logit of a token with itself over
    the others by about s lam^2 d. With a gap g the diagonal of P is 1/(1 + (N-1) e^-g), so beyond ln N + 5 at least
    1/(1 + e^-5) = 99.3 % of the mass sits on it and Wq, Wk get next to no gradient. A dead head has an excellent
    kappa(J), so the rule is worth more than the condition number.

    Args:
        lam: correction on queries and keys.
        head_dim: d.
        num_tokens: N.
        scale: s, 1/sqrt(d) if None.
        strict: raise outside the hypotheses.

    Raises: HypothesisError unless s > 0 and N >= 2.

    Example:
        >>> saturation(2.0, head_dim=64, num_tokens=197).value, saturation(2.0, head_dim=64, num_tokens=197).saturates
        (32.0, True)
    """
    scale = head_dim**-0.5 if scale is None else scale
    hypotheses = (
        Hypothesis("s > 0", scale > 0, {"s": scale}),
        Hypothesis("N >= 2", num_tokens >= 2, {"N": num_tokens}),
    )
    statement = Saturation(
        name="saturation",
        value=scale * lam**2 * head_dim if all_hold(hypotheses) else None,
        hypotheses=hypotheses,
        reference=ours("section 7.1"),
        threshold=math.log(num_tokens) + 5,
    )
    return settle(statement, strict=strict)
