"""Initialise a ViT on one batch by `calibrated`, and see with the doctor what that sets.

Run: python examples/01_initialise_a_vit.py
"""

import timm
import torch
from sklearn.datasets import load_digits

import wellcond as wc


def main() -> None:
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images[:32], dtype=torch.float32)[:, None]
    images = (images - images.mean()) / images.std()
    small = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 64, "depth": 4, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", **small, num_classes=10)

    before = wc.diagnose(model, images)
    wc.init_(model, "calibrated", batch=images, generator=torch.Generator().manual_seed(0))
    after = wc.diagnose(model, images)

    print(f"{'':22}positions/patches  {'logits':>8} {'attention adds':>15} {'MLP adds':>9}")
    for name, found in (("as timm draws it", before), ("calibrated", after)):
        layer = found.layers[0]
        print(
            f"{name:22}{found.tokens.position_ratio:17.3f}  {layer.logit_spread:8.3f} {layer.attention_share:15.3f} "
            f"{layer.mlp_share:9.3f}"
        )
    print(f"findings before: {', '.join(finding.kind for finding in before.findings)}")
    print(f"findings after:  {', '.join(finding.kind for finding in after.findings) or 'none'}")

    # The line that the doctor prints for an untrained model is the one that was run.
    assert {finding.remedy for finding in before.findings} == {'wc.init_(model, "calibrated", batch=batch)'}
    assert after.findings == ()
    for layer in after.layers:
        assert abs(layer.logit_spread - 1) < 0.05 and abs(layer.attention_share - 0.15) < 0.01
    print("Logits of every layer have deviation 1, and each part adds 0.15 of its stream.")


if __name__ == "__main__":
    main()
