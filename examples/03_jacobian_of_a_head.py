"""Measure the parameter Jacobian of one attention head, with its bounds, and the papers' formula beside it.

Run: python examples/03_jacobian_of_a_head.py
"""

import torch

import wellcond as wc
from wellcond.theory import Head, kappa_bound, lower_bound, papers_bound, upper_bound


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, width, head_dim = 24, 48, 16
    x = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    x = torch.nn.functional.layer_norm(x, (width,))
    usual = 0.08 * torch.randn(3, head_dim, width, generator=generator, dtype=torch.float64)

    j = wc.jacobian_spectrum(x, *usual)
    print(f"J has {j.shape[0]} outputs and {j.shape[1]} parameters, rank {j.rank}; {j.status}, by {j.method}")
    print(f"sigma_max {j.sigma_max:.4g}, sigma_min {j.sigma_min:.4g}, condition number {j.condition_number:.4g}")

    # Automatic differentiation forms all of J. It agrees, and is what a structured method need not do.
    def output(w_q: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor) -> torch.Tensor:
        logits = (x @ w_q.T) @ (x @ w_k.T).T / head_dim**0.5
        return torch.softmax(logits, dim=-1) @ (x @ w_v.T)

    blocks = torch.func.jacrev(output, argnums=(0, 1, 2))(*usual)
    dense = torch.cat([block.reshape(num_tokens * head_dim, -1) for block in blocks], dim=1)
    singular_values = torch.linalg.svdvals(dense)
    print(f"by automatic differentiation: {singular_values[0]:.4g} and {singular_values[-1]:.4g}")

    head = Head(x, *usual, head_dim**-0.5)
    low, high, kappa = lower_bound(head), upper_bound(head), kappa_bound(head)
    print(f"bounds that hold: {low.value**0.5:.4g} <= sigma_min, sigma_max <= {high.value**0.5:.4g}")
    print(f"                  condition number <= {kappa.value:.4g}")

    # The papers print a bound in terms of condition numbers. Two tokens are enough to contradict it.
    two, one = torch.tensor([[1.0], [2.0]]), torch.ones(1, 1)
    true = wc.jacobian_spectrum(two, one, one, one, scale=1.0).condition_number
    printed = papers_bound(Head(two, one, one, one, 1.0)).value
    print(f"two tokens: condition number {true:.1f}, the papers' bound {printed:.1f}")

    assert j.status == "exact" and j.rank == num_tokens * head_dim
    torch.testing.assert_close(torch.tensor([j.sigma_max, j.sigma_min]), singular_values[[0, -1]].float())
    assert low.value**0.5 <= j.sigma_min and j.sigma_max <= high.value**0.5
    assert j.condition_number <= kappa.value
    assert true > printed


if __name__ == "__main__":
    main()
