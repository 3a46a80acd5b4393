"""Give a ViT of timm well-conditioned queries and keys, and check every head.

Run: python examples/01_initialise_a_vit.py
"""

import timm
import torch

import wellcond as wc


def worst_condition_numbers(model: torch.nn.Module) -> dict[str, float]:
    """The largest condition number of W_Q, W_K, W_V over all heads of all layers."""
    sites = wc.find_attention(model)
    return {role: max(torch.linalg.cond(site.slots[role].read()).max().item() for site in sites) for role in "qkv"}


def main() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224")
    others = {name: p.clone() for name, p in model.named_parameters() if ".attn.qkv." not in name}
    sites = wc.find_attention(model)
    print(f"{len(sites)} attentions of {sites[0].num_heads} heads, each W_Q of {tuple(sites[0].q.read().shape[1:])}")

    print("worst condition number over all heads")
    print(f"  as timm starts   {_show(worst_condition_numbers(model))}")
    wc.init_(model, "conditioned", generator=torch.Generator().manual_seed(0))
    after = worst_condition_numbers(model)
    print(f"  conditioned      {_show(after)}")

    # kappa(W) = 1 means that all singular values are equal: the rows of each head are orthonormal.
    for site in sites:
        for heads in (site.q.read(), site.k.read()):
            torch.testing.assert_close(heads @ heads.mT, torch.eye(site.head_dim).expand(site.num_heads, -1, -1))
    # Nothing but the attention projections was written.
    assert all(torch.equal(p, others[name]) for name, p in model.named_parameters() if name in others)
    assert max(after.values()) < 1.0001
    print("Q and K of every head have condition number 1; no other weight has changed.")


def _show(numbers: dict[str, float]) -> str:
    return "   ".join(f"W_{role.upper()} {value:8.4f}" for role, value in numbers.items())


if __name__ == "__main__":
    main()
