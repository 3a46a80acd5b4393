"""Train with a correction in every forward pass, then fold it away: the same outputs from a plain model.

Run: python examples/02_condition_train_fold.py
"""

import timm
import torch

import wellcond as wc


def main() -> None:
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", **small)
    plain_keys, parameters = list(model.state_dict()), list(model.parameters())

    wc.condition_(model, "balanced")
    extra = [key for key in model.state_dict() if key not in plain_keys]
    print(f"conditioned: no new parameter, one new key in the checkpoint: {extra}")

    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")

    site = wc.find_attention(model)[0]
    raw, used = (torch.linalg.cond(w).max().item() for w in (site.q.read_raw(), site.q.read()))
    print(f"worst head of W_Q in layer 0: kappa {raw:.2f} as stored, {used:.2f} as used (at most 2)")

    model.eval()
    with torch.no_grad():
        before = model(images)
        wc.fold_(model)
        after = model(images)
    print(f"folded: outputs differ by at most {(before - after).abs().max().item():.1e}, keys as before")

    assert used <= 2.0 + 1e-4 < raw
    torch.testing.assert_close(after, before)
    assert list(model.state_dict()) == plain_keys
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    # A plain timm model loads the weights, without wellcond.
    timm.create_model("vit_tiny_patch16_224", **small).load_state_dict(model.state_dict())


if __name__ == "__main__":
    main()
