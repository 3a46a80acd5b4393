"""Mask R-CNN on timm backbones: its maps, its names, and torchvision's own detector as the reference."""

import pytest
import timm
import torch
from torch import nn
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.ops import FeaturePyramidNetwork

import wellcond.lab  # noqa: F401  (adds the models wellcond:NAME)  # noqa: F401  (adds the models wellcond:NAME)
from lab.tasks.detection.small_detector import HEADS, SWIN, XCIT, batch_of, detector
from wellcond.errors import ModelSpecError
from wellcond.lab.models.build import build_model
from wellcond.lab.models.mask_rcnn import Detector, SharedBatchNorm

SIZES = [(40, 60), (64, 33), (50, 50)]
BOTH = pytest.mark.parametrize("backbone", [XCIT, SWIN], ids=["xcit", "swin"])


@pytest.mark.parametrize(
    ("backbone", "options", "size"),
    [
        (XCIT, {}, (64, 96)),
        (XCIT, {}, (32, 160)),
        (SWIN, {}, (32, 32)),
        (SWIN, {}, (160, 96)),  # maps of 40 x 24 to 5 x 3 in windows of 4 x 4: padded
    ],
    ids=str,
)
def test_maps_have_strides_4_to_64(backbone, options, size):
    maps = detector(backbone, **options).train().backbone(torch.rand(2, 3, *size))
    assert list(maps) == ["0", "1", "2", "3", "pool"]
    expected = [[-(-side // stride) for side in size] for stride in (4, 8, 16, 32, 64)]
    assert [list(m.shape) for m in maps.values()] == [[2, HEADS["pyramid_width"], *sides] for sides in expected]


def kinds(module):
    return [type(part).__name__ for part in (module if isinstance(module, nn.Sequential) else [module])]


def test_a_column_becomes_four_strides_as_in_the_papers():
    double = detector(XCIT).backbone
    assert [kinds(level) for level in double.levels] == [
        ["ConvTranspose2d", "SharedBatchNorm", "GELU", "ConvTranspose2d"],
        ["ConvTranspose2d"],
        ["Identity"],
        ["MaxPool2d"],
    ]
    assert isinstance(double.pyramid, FeaturePyramidNetwork)
    assert [tuple(m.weight.shape[2:]) for m in double.levels[0] if hasattr(m, "stride")] == [(2, 2), (2, 2)]


def test_one_transposed_convolution_is_the_papers_other_reading():
    single = detector(XCIT, upsampling="single").train().backbone
    assert kinds(single.levels[0]) == ["ConvTranspose2d"] and tuple(single.levels[0].weight.shape[2:]) == (4, 4)
    assert single(torch.rand(1, 3, 64, 96))["0"].shape[-2:] == (16, 24)


def test_proposals_pooling_and_box_loss_of_the_release():
    images, sizes, targets = batch_of(SIZES)
    plain = detector(XCIT).train()
    release = detector(XCIT, proposals_kept=[7, 5], pooling_samples=0, box_loss="l1").train()
    assert release.roi_heads.box_roi_pool.sampling_ratio == release.roi_heads.mask_roi_pool.sampling_ratio == 0
    kept = []
    release.rpn.register_forward_hook(lambda _, inputs, output: kept.append([len(boxes) for boxes in output[0]]))
    torch.manual_seed(0)
    smooth = plain(images, sizes, targets)
    torch.manual_seed(0)
    absolute = release(images, sizes, targets)
    assert max(kept[0]) == 7
    # The same anchors are drawn: |x| is above x^2 / (2 beta) and above |x| - beta / 2.
    assert absolute["loss_objectness"] == smooth["loss_objectness"]
    assert absolute["loss_rpn_box_reg"] > smooth["loss_rpn_box_reg"]
    release.eval()(images, sizes)
    assert max(kept[1]) <= 5


@pytest.mark.parametrize(("depth", "taps"), [(4, (0, 1, 2, 3)), (6, (1, 2, 3, 5)), (12, (3, 5, 7, 11))])
def test_taps_are_those_of_the_release(depth, taps):
    arguments = XCIT["backbone_arguments"] | {"depth": depth}
    assert detector(XCIT | {"backbone_arguments": arguments}).backbone.taps == taps


@BOTH
def test_names_and_values_of_the_backbone_are_those_of_timm(backbone):
    model = detector(backbone).eval()
    own = timm.create_model(backbone["backbone"], img_size=128, num_classes=0, **backbone["backbone_arguments"]).eval()
    state = {key: value for key, value in own.state_dict().items() if not key.startswith(Detector.encoder_left_out)}
    prefix = Detector.encoder_prefix
    ours = {key.removeprefix(prefix): value for key, value in model.state_dict().items() if key.startswith(prefix)}
    assert list(ours) == list(state) and all(ours[key].shape == state[key].shape for key in ours)
    own.load_state_dict(ours, strict=False)
    image, taps = torch.rand(1, 3, 128, 128), model.backbone.taps
    expected = own.forward_intermediates(image, indices=list(taps), intermediates_only=True)
    found = model.backbone.body.forward_intermediates(image, indices=list(taps), intermediates_only=True)
    assert len(found) == 4 and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


@BOTH
def test_losses_are_those_of_torchvision(backbone):
    model = detector(backbone).train()
    images, sizes, targets = batch_of(SIZES)
    single = [image[:, :h, :w] for image, (h, w) in zip(images, SIZES, strict=True)]
    whole = [target | {"masks": target["masks"][:, :h, :w]} for target, (h, w) in zip(targets, SIZES, strict=True)]
    model.transform._skip_resize = True
    torch.manual_seed(1)
    expected = GeneralizedRCNN.forward(model, single, whole)
    torch.manual_seed(1)
    found = model(images, sizes, targets)
    assert found.keys() == expected.keys() and len(found) == 5
    for name in found:
        assert found[name].item() == pytest.approx(expected[name].item(), rel=1e-5), name


@BOTH
@torch.no_grad()
def test_detections_are_those_of_torchvision(backbone):
    model = detector(backbone).eval()
    images, sizes, _ = batch_of(SIZES)
    found = model(images, sizes)
    for place, (h, w) in enumerate(SIZES):
        model.transform.min_size, model.transform.max_size = (min(h, w),), max(h, w)
        [expected] = GeneralizedRCNN.forward(model, [images[place, :, :h, :w]])
        assert len(expected["boxes"]) == 10 and found[place]["masks"].shape[-2:] == (h, w)
        for name in expected:
            assert torch.allclose(found[place][name].double(), expected[name].double(), atol=1e-5), name


@BOTH
@torch.no_grad()
def test_an_image_is_evaluated_alike_in_every_batch(backbone):
    model = detector(backbone).eval()
    images, sizes, targets = batch_of(SIZES)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found, losses = model(images, sizes, targets, original_sizes=2 * sizes, seeds=[5, 6, 7])
    alone, losses_alone = model(images[1:2], sizes[1:2], targets[1:2], original_sizes=2 * sizes[1:2], seeds=[6])
    assert losses_alone == losses[1:2] and all(torch.equal(alone[0][name], found[1][name]) for name in alone[0])
    assert torch.equal(torch.get_rng_state(), state) and not any(part.training for part in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert found[0]["masks"].shape[-2:] == (80, 120)
    assert [float(loss["loss_mask"]) > 0 for loss in losses] == [True, True, False]  # nothing is in the last image


def test_the_heads_predict_in_float32_under_automatic_mixed_precision():
    heads = detector().eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        for part in (heads.rpn.head, heads.roi_heads.box_predictor, heads.roi_heads.mask_predictor):
            for convolution in [module for module in part.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]:
                convolution.register_forward_pre_hook(lambda module, given: (given[0].float(),))
        scores, boxes = heads.rpn.head([torch.rand(1, HEADS["pyramid_width"], 4, 4)])
        predicted = heads.roi_heads.box_predictor(torch.rand(2, HEADS["box_head"]))
        assert {value.dtype for value in (*scores, *boxes, *predicted)} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": "resnet18", "backbone_arguments": {}}, "expected an XCiT or Swin of timm, found resnet18"),
        ({"backbone": "xcit_nano_12_p17_224"}, "timm has no model 'xcit_nano_12_p17_224'. Similar names: xcit"),
        ({"backbone_arguments": {"depth": 3}}, "or four of stride 16, found [16, 16, 16]"),
        ({"anchors": 3}, "Did you mean 'anchor_sizes'"),
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(changes, message):
    with pytest.raises((ModelSpecError, ValueError)) as caught:
        build_model("wellcond:mask_rcnn", {"num_classes": 3} | XCIT | changes)
    assert message in str(caught.value)


def test_batch_norm_over_ranks_is_batch_norm_of_all_their_samples(tmp_path):
    """Here of one rank, which DDP must take on a CPU; tests/lab/tasks/test_detection.py has two."""
    from torch.distributed import FileStore, destroy_process_group, init_process_group
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    images, weights = 3 + 2 * torch.randn(4, 3, 5, 6), torch.randn(4, 3, 5, 6)
    init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        results = []
        for module in (nn.BatchNorm2d(3), DistributedDataParallel(SharedBatchNorm(3))):
            given = images.clone().requires_grad_()
            made = module(given)
            (made * weights).sum().backward()
            plain = getattr(module, "module", module)
            gradients = [given.grad, plain.weight.grad, plain.bias.grad]
            results.append([made, *gradients, plain.running_mean, plain.running_var, plain.eval()(images)])
            assert plain.num_batches_tracked == 1
    finally:
        destroy_process_group()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_scales_of_regions_are_not_guessed_from_the_first_image():
    model = detector().eval()
    with torch.no_grad():
        model(torch.rand(1, 3, 64, 64), torch.tensor([[33, 33]]))
    assert model.roi_heads.box_roi_pool.scales == model.roi_heads.mask_roi_pool.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32]
