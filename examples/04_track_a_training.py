"""Follow the conditioning of every layer while a small ViT learns scikit-learn's digits.

Run: python examples/04_track_a_training.py
"""

import timm
import torch
from sklearn.datasets import load_digits

import wellcond as wc


def main() -> None:
    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images))
    train, test = order[:1297], order[1297:]

    small = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", **small, num_classes=10)
    wc.init_(model, "calibrated", batch=images[train[:64]])

    epochs, batch_size = 4, 32
    steps = epochs * (len(train) // batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # The Jacobian of the first head of each layer at the start, in the middle and at the end, on one test image.
    moments = {0, steps // 2, steps}
    tracker = wc.ConditionTracker(model, images[test[:1]], every=moments, budget=None, heads=[0])
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(batch_size)[: len(train) // batch_size]:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            tracker.step()

    print(f"{'step':>5}  {'layer':14} {'kappa(J)':>10} {'kappa(W_Q)':>11} {'entropy/ln N':>13}")
    for p in tracker.points:
        print(
            f"{p.step:5}  {p.layer:14} {p.pseudo_condition_number:10.3g} {p.kappa_q:11.3f} {p.normalised_entropy:13.3f}"
        )
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    print(f"test accuracy after {epochs} epochs: {accuracy:.1%} (chance: 10 %)")

    assert {p.step for p in tracker.points} == moments
    first, last = tracker.points[0], tracker.points[-1]
    assert first.kappa_q != last.kappa_q  # initialisation acts at step 0 only; training moves the weights
    assert not any(p.dead for p in tracker.points)
    assert accuracy > 0.6


if __name__ == "__main__":
    main()
