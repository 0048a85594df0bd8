"""The zoo: counts against published ones, a plain training step each, arguments, names, refusals."""

from __future__ import annotations

import inspect
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from edgetrain import zoo
from edgetrain.errors import UserError
from edgetrain.zoo.models.densenet import DenseLayer
from edgetrain.zoo.models.googlenet import auxiliary_loss, googlenet
from edgetrain.zoo.models.mobilenet_v2 import round_to_eights
from edgetrain.zoo.models.published import published

NAMES = tuple(zoo.MODELS)

# Arguments that make a step take well under a second.
SMALL: dict[str, dict[str, Any]] = {
    "lenet": {"classes": 10, "input_size": 8},
    "alexnet": {"classes": 5, "input_size": 63, "width": 0.125},
    "vgg16": {"classes": 5, "input_size": 32, "width": 0.0625},
    "vgg16_cifar": {"classes": 5, "input_size": 64, "width": 0.0625},
    "mobilenet_v1": {"classes": 5, "input_size": 32, "width": 0.25},
    "mobilenet_v2": {"classes": 5, "input_size": 32, "width": 0.35},
    "squeezenet": {"classes": 5, "input_size": 32, "width": 0.5},
    "googlenet": {"classes": 5, "input_size": 32, "width": 0.25},
    "resnet18": {"classes": 5, "input_size": 32, "width": 0.25},
    "resnet18_cifar": {"classes": 5, "input_size": 16, "width": 0.25},
    "resnet50": {"classes": 5, "input_size": 32, "width": 0.25},
    "densenet121": {"classes": 5, "input_size": 32, "width": 0.25},
    "char_lstm": {"classes": 30, "input_size": 6, "width": 0.125},
    "bert_small": {"classes": 3, "input_size": 12, "width": 0.25},
    "bert_base": {"classes": 3, "input_size": 12, "width": 1 / 6},
    "autoencoder": {"input_size": 8},
    "ds_cnn": {"classes": 5, "input_size": 20, "width": 0.25},
    "minilearn_kws": {"classes": 5, "input_size": 28, "width": 0.5},
    "minilearn_cifar": {"classes": 5, "input_size": 22, "width": 0.5},
    "minilearn_har": {"classes": 5, "input_size": 10, "width": 0.5},
}

SMALLEST = {
    "lenet": 4,
    "alexnet": 63,
    "vgg16": 32,
    "vgg16_cifar": 32,
    "squeezenet": 17,
    "googlenet": 15,
    "densenet121": 29,
    "minilearn_cifar": 22,
}

# How many entries torchvision's state dict has, and some of them.
TORCHVISION: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = {
    "alexnet": (16, {"features.0.weight": (64, 3, 11, 11), "classifier.6.bias": (1000,)}),
    "vgg16": (
        32,
        {
            "features.0.weight": (64, 3, 3, 3),
            "features.28.bias": (512,),
            "classifier.0.weight": (4096, 25088),
            "classifier.3.weight": (4096, 4096),
            "classifier.6.weight": (1000, 4096),
        },
    ),
    "mobilenet_v2": (
        314,
        {
            "features.0.0.weight": (32, 3, 3, 3),
            "features.1.conv.0.0.weight": (32, 1, 3, 3),
            "features.1.conv.2.running_mean": (16,),
            "features.2.conv.1.0.weight": (96, 1, 3, 3),
            "features.18.1.bias": (1280,),
            "classifier.1.weight": (1000, 1280),
        },
    ),
    "squeezenet": (
        52,
        {"features.3.squeeze.weight": (16, 64, 1, 1), "classifier.1.weight": (1000, 512, 1, 1)},
    ),
    "googlenet": (
        344,
        {
            "conv1.conv.weight": (64, 3, 7, 7),
            "inception3a.branch3.1.conv.weight": (32, 16, 3, 3),
            "inception5b.branch4.1.bn.weight": (128,),
            "fc.weight": (1000, 1024),
        },
    ),
    "resnet18": (122, {"layer2.0.downsample.0.weight": (128, 64, 1, 1), "bn1.num_batches_tracked": ()}),
    "resnet50": (
        320,
        {"layer1.0.downsample.1.running_var": (256,), "layer4.2.conv3.weight": (2048, 512, 1, 1)},
    ),
    "densenet121": (
        727,
        {
            "features.conv0.weight": (64, 3, 7, 7),
            "features.norm0.running_mean": (64,),
            "features.denseblock1.denselayer1.norm1.weight": (64,),
            "features.denseblock3.denselayer24.conv1.weight": (128, 992, 1, 1),
            "features.denseblock4.denselayer16.conv2.weight": (32, 128, 3, 3),
            "features.transition3.norm.num_batches_tracked": (),
            "features.transition3.conv.weight": (512, 1024, 1, 1),
            "features.norm5.bias": (1024,),
            "classifier.weight": (1000, 1024),
        },
    ),
}


def hollow(name: str, **arguments: Any) -> nn.Module:
    """A model without storage: enough to count and to name its parameters."""
    with torch.device("meta"):
        return zoo.build(name, **arguments)


def parameters(name: str, **arguments: Any) -> int:
    return sum(parameter.numel() for parameter in hollow(name, **arguments).parameters())


def example(name: str, batch: int) -> tuple[torch.Tensor, ...]:
    arguments = {key: value for key, value in SMALL[name].items() if key != "width"}
    return zoo.get(name).example(batch, **arguments)


# --- counts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TORCHVISION))
def test_counts_are_those_torchvision_publishes(name: str) -> None:
    entry = zoo.get(name)
    published = entry.published[0]
    counts = zoo.count(hollow(name), entry.example(1)[0])
    assert published.source.startswith("torchvision")
    assert published.multiply_adds is not None
    assert counts.parameters == published.parameters
    assert abs(counts.multiply_adds - published.multiply_adds) <= 500_000  # printed to a thousandth of a giga


def test_counts_in_print_are_of_networks_of_the_zoo() -> None:
    assert published().keys() <= zoo.MODELS.keys()


def test_counts_of_the_networks_torchvision_does_not_have() -> None:
    lenet = zoo.count(hollow("lenet"), zoo.get("lenet").example(1)[0])
    assert lenet == zoo.Counts(61_706, 117_600 + 240_000 + 400 * 120 + 120 * 84 + 84 * 10)
    autoencoder = zoo.count(hollow("autoencoder"), zoo.get("autoencoder").example(1)[0])
    assert autoencoder == zoo.Counts(209_968, 2 * (784 * 128 + 128 * 32))


def test_bert_small_has_the_published_28_8_million() -> None:
    counts = zoo.count(hollow("bert_small"), zoo.get("bert_small").example(1)[0])
    assert counts.parameters == 28_763_648 + 2 * 513
    layer = 128 * (4 * 512 * 512 + 2 * 512 * 2048) + 2 * 128 * 128 * 512
    assert counts.multiply_adds == 4 * layer + 512 * 512 + 512 * 2


def test_bert_base_has_the_published_109_482_240_without_its_classifier() -> None:
    entry = zoo.get("bert_base")
    counts = zoo.count(hollow("bert_base"), entry.example(1)[0])
    assert counts.parameters == entry.published[0].parameters + 2 * 769
    layer = 128 * (4 * 768 * 768 + 2 * 768 * 3072) + 2 * 128 * 128 * 768
    assert counts.multiply_adds == 12 * layer + 768 * 768 + 768 * 2


@pytest.mark.parametrize(
    ("width", "multiply_adds", "published"),
    [(1.0, 569_000_000, 4_200_000), (0.75, 325_000_000, 2_600_000), (0.5, 149_000_000, 1_300_000), (0.25, 41e6, 5e5)],
)
def test_mobilenet_v1_has_the_counts_of_table_6(width: float, multiply_adds: int, published: int) -> None:
    counts = zoo.count(hollow("mobilenet_v1", width=width), zoo.get("mobilenet_v1").example(1)[0])
    assert abs(counts.multiply_adds - multiply_adds) <= 1_000_000
    assert abs(counts.parameters - published) <= 50_000
    assert width != 1.0 or counts == zoo.Counts(4_231_976, 568_740_352)


def test_networks_for_cifar_10() -> None:
    """The first dense layer is as large as 32×32 needs; the stem keeps the side: stages at 32, 16, 8 and 4."""
    vgg = zoo.count(hollow("vgg16_cifar"), zoo.get("vgg16_cifar").example(1)[0])
    convolutions = 15_346_630_656 // 49  # those at 224×224, of an image with 49 times as many pixels
    assert vgg == zoo.Counts(33_638_218, convolutions + 512 * 4096 + 4096 * 4096 + 4096 * 10)
    assert vgg.parameters == zoo.get("vgg16_cifar").published[0].parameters
    assert parameters("vgg16_cifar", classes=1000, input_size=224) == parameters("vgg16")
    resnet = zoo.count(hollow("resnet18_cifar"), zoo.get("resnet18_cifar").example(1)[0])
    assert resnet == zoo.Counts(11_173_962, 555_422_720)
    assert resnet.parameters == 11_689_512 - 64 * 3 * (49 - 9) - 990 * 513


def test_lstm_steps_are_counted() -> None:
    counts = zoo.count(hollow("char_lstm"), zoo.get("char_lstm").example(1)[0])
    assert counts.parameters == 798_720 + 65 * 265
    assert counts.multiply_adds == 80 * (4 * 256 * (8 + 256) + 4 * 256 * (256 + 256) + 256 * 65)


def test_notes_on_published_counts_hold() -> None:
    batch_norm = sum(
        parameter.numel()
        for module in hollow("mobilenet_v2").modules()
        if isinstance(module, nn.BatchNorm2d)
        for parameter in module.parameters()
    )
    assert (batch_norm, parameters("mobilenet_v2") - batch_norm) == (34_112, 3_470_760)
    cifar = zoo.count(hollow("googlenet", classes=10), zoo.get("googlenet").example(1, input_size=32)[0])
    assert cifar == zoo.Counts(5_610_154, 30_568_448)
    vgg = zoo.count(hollow("vgg16", classes=10), zoo.get("vgg16").example(1, input_size=32)[0])
    assert vgg == zoo.Counts(134_301_514, 15_346_630_656 // 49 + 25088 * 4096 + 4096 * 4096 + 4096 * 10)
    assert round(vgg.multiply_adds, -7) == 430_000_000
    assert parameters("vgg16_cifar", classes=100) == 34_006_948
    assert parameters("resnet18_cifar", classes=100) == 11_220_132
    running = [value for key, value in hollow("mobilenet_v1").named_buffers() if "running" in key]
    assert sum(value.numel() for value in running) == 4_253_864 - 4_231_976 == 21_888
    whole, stem, head = parameters("squeezenet"), 64 * 3 * 9 + 64, 1000 * 512 + 1000
    assert whole - stem - head == 720_704


def test_auxiliary_classifiers_are_off_unless_asked_for() -> None:
    with torch.device("meta"):
        model = googlenet(auxiliary=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 13_004_888
    assert not any(key.startswith("aux") for key in hollow("googlenet").state_dict())


def test_count_leaves_the_model_as_it_was() -> None:
    model = zoo.build("resnet18", **SMALL["resnet18"])
    model.get_submodule("layer1").eval()
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    mkldnn = torch._C._get_mkldnn_enabled()
    zoo.count(model, torch.zeros(1, 3, 32, 32))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch._C._get_mkldnn_enabled() == mkldnn


def test_count_takes_one_tensor_or_several_and_scales_with_the_batch() -> None:
    model, entry = zoo.build("lenet"), zoo.get("lenet")
    one = zoo.count(model, entry.example(1)[:1])
    assert zoo.count(model, entry.example(3)[0]).multiply_adds == 3 * one.multiply_adds


# --- a training step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_one_plain_training_step(name: str) -> None:
    torch.manual_seed(0)
    model, batch = zoo.build(name, **SMALL[name]), example(name, 4)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    loss = zoo.get(name).task.loss(model, *batch)
    torch.autograd.backward(loss)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.training
    assert loss.shape == ()
    assert torch.isfinite(loss)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        # A shift of all keys leaves the attention as it is: their bias has no gradient but rounding.
        if not key.endswith("key.bias"):
            assert not torch.equal(parameter, before[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_correct_predictions_are_counted(name: str) -> None:
    task, batch = zoo.get(name).task, example(name, 4)
    output = zoo.build(name, **SMALL[name]).eval()(batch[0])
    if task.accuracy is None:
        assert task is zoo.TASKS["reconstruct"]
        assert output.shape == batch[0].shape
        return
    perfect = nn.functional.one_hot(batch[1], SMALL[name]["classes"]).float()
    assert perfect.shape == output.shape
    assert task.accuracy(perfect, *batch) == batch[1].numel()
    assert 0 <= task.accuracy(output, *batch) <= batch[1].numel()


def test_googlenet_trains_with_auxiliary_classifiers() -> None:
    torch.manual_seed(0)
    model, (x, y) = googlenet(auxiliary=True, **SMALL["googlenet"]), example("googlenet", 4)
    torch.autograd.backward(auxiliary_loss(model, x, y))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.eval()(x).shape == (4, 5)


def test_tasks_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(dict(zoo.TASKS))) == zoo.TASKS


# --- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_builders_and_entries_have_the_same_defaults(name: str) -> None:
    entry, signature = zoo.get(name), inspect.signature(zoo.get(name).build).parameters
    assert (signature["classes"].default or 0) == entry.classes
    assert signature["input_size"].default == entry.input_size
    assert signature["width"].default == entry.width == 1.0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "autoencoder"])
def test_classes_change_the_scores(name: str) -> None:
    arguments = SMALL[name] | {"classes": 7}
    output = zoo.build(name, **arguments).eval()(
        zoo.get(name).example(2, classes=7, input_size=arguments["input_size"])[0]
    )
    assert output.shape[-1] == 7


@pytest.mark.parametrize("name", NAMES)
def test_width_changes_the_number_of_parameters(name: str) -> None:
    assert parameters(name, width=0.5) < parameters(name) < parameters(name, width=1.5)


def test_input_size_changes_the_dense_layers_of_lenet_and_autoencoder() -> None:
    assert parameters("lenet", input_size=8) == 61_706 - (400 - 64) * 120
    assert parameters("autoencoder", input_size=8) == 2 * (64 * 128 + 128 * 32) + 128 + 32 + 128 + 64


@pytest.mark.parametrize("size", [4, 8, 11, 19, 20, 28, 32])
def test_lenet_works_on_any_size_it_accepts(size: int) -> None:
    assert zoo.build("lenet", input_size=size)(torch.zeros(2, 1, size, size)).shape == (2, 10)


def test_autoencoder_takes_flat_inputs() -> None:
    assert zoo.build("autoencoder", input_size=8)(torch.zeros(2, 64)).shape == (2, 64)


def test_narrow_mobilenets_round_channels_to_eights() -> None:
    assert [round_to_eights(channels * 0.35) for channels in (16, 32, 96, 320)] == [8, 16, 32, 112]
    assert round_to_eights(11.2) == 16  # 8 would be less than nine tenths of it
    assert hollow("mobilenet_v2", width=0.35).get_parameter("classifier.1.weight").shape == (1000, 1280)


@pytest.mark.parametrize("name", list(SMALLEST))
def test_the_smallest_input_size_is_the_smallest_that_works(name: str) -> None:
    channels, smallest = zoo.get(name).channels, SMALLEST[name]
    model = hollow(name, input_size=smallest)
    assert model(torch.zeros(2, channels, smallest, smallest, device="meta")).shape[0] == 2
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, channels, smallest - 1, smallest - 1, device="meta"))
    with pytest.raises(UserError, match=f"smallest input size is {smallest}"):
        zoo.build(name, input_size=smallest - 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [{"classes": 0}, {"input_size": 0}, {"width": 0.0}, {"width": math.nan}])
def test_wrong_arguments_are_refused(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=name):
        zoo.build(name, **wrong)


def test_arguments_without_meaning_are_refused() -> None:
    with pytest.raises(UserError, match="no classes"):
        zoo.build("autoencoder", classes=10)
    with pytest.raises(UserError, match="no classes"):
        zoo.get("autoencoder").example(1, classes=10)
    with pytest.raises(UserError, match="1 to 512"):
        zoo.build("bert_small", input_size=513)


def test_wrong_names_are_answered_with_the_closest() -> None:
    with pytest.raises(UserError, match="did you mean 'mobilenet_v2'") as caught:
        zoo.build("MobileNet-v2")
    assert all(name in str(caught.value) for name in NAMES)
    with pytest.raises(UserError, match="choose one of these names"):
        zoo.get("xyzzy")


# --- examples ---------------------------------------------------------------------------------------------


def test_examples_have_the_shapes_of_the_task() -> None:
    x, y = zoo.get("lenet").example(3, input_size=8, dtype=torch.float64)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((3, 1, 8, 8), torch.float64, (3,), torch.int64)
    x, y = zoo.get("char_lstm").example(3)
    assert (x.shape, y.shape, x.dtype) == ((3, 80), (3, 80), torch.int64)
    assert torch.equal(x[:, 1:], y[:, :-1])
    x, y = zoo.get("bert_small").example(3)
    assert (x.shape, y.shape, x.dtype) == ((3, 128), (3,), torch.int64)
    assert x.min() > 0
    assert x.max() < 30522


def test_a_model_says_which_shapes_it_takes() -> None:
    keywords, image, tokens = (zoo.get(name) for name in ("ds_cnn", "lenet", "bert_small"))
    assert (keywords.channels, image.channels, tokens.channels) == (0, 1, 0)
    assert (keywords.input_shape(), keywords.input_shape(30)) == ((1, 49, 10), (1, 30, 10))
    assert keywords.example(2, input_size=30)[0].shape == (2, 1, 30, 10)
    assert zoo.get("minilearn_har").input_shape(40) == (40, 3, 1)
    assert [keywords.size_in(shape) for shape in ((1, 30, 10), (1, 30, 12), (3, 30, 10), (30,), ())] == [
        30,
        *[None] * 4,
    ]
    assert [image.size_in(shape) for shape in ((1, 8, 8), (1, 8, 9), (3, 8, 8))] == [8, None, None]
    assert [tokens.size_in(shape) for shape in ((7,), (7, 1))] == [7, None]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_takes_the_shape_that_it_says(name: str) -> None:
    entry = zoo.get(name)
    assert entry.size_in(entry.input_shape()) == entry.input_size
    assert entry.example(1)[0].shape[1:] == entry.input_shape()


def test_examples_follow_the_seed() -> None:
    entry = zoo.get("lenet")
    assert torch.equal(entry.example(2)[0], entry.example(2)[0])
    assert not torch.equal(entry.example(2)[0], entry.example(2, seed=1)[0])
    with pytest.raises(UserError, match="at least one"):
        entry.example(0)


# --- names of parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TORCHVISION))
def test_parameters_have_the_names_torchvision_gives_them(name: str) -> None:
    state = hollow(name).state_dict()
    entries, sample = TORCHVISION[name]
    assert len(state) == entries
    assert {key: tuple(state[key].shape) for key in sample} == sample


def test_the_networks_for_cifar_have_torchvision_s_names_too() -> None:
    for name, original in (("vgg16_cifar", "vgg16"), ("resnet18_cifar", "resnet18")):
        own, theirs = hollow(name, classes=1000).state_dict(), hollow(original).state_dict()
        assert list(own) == list(theirs)
        other = {key for key in own if own[key].shape != theirs[key].shape}
        assert other == {"vgg16": {"classifier.0.weight"}, "resnet18": {"conv1.weight"}}[original]


def test_mobilenet_v1_has_the_names_of_timm() -> None:
    state = hollow("mobilenet_v1").state_dict()
    sample = {
        "conv_stem.weight": (32, 3, 3, 3),
        "bn1.running_var": (32,),
        "blocks.0.0.conv_dw.weight": (32, 1, 3, 3),
        "blocks.3.5.bn1.weight": (512,),
        "blocks.3.5.conv_pw.weight": (512, 512, 1, 1),
        "blocks.4.0.bn2.bias": (1024,),
        "classifier.weight": (1000, 1024),
    }
    assert len(state) == 164
    assert {key: tuple(state[key].shape) for key in sample} == sample


# --- the same numbers as others ---------------------------------------------------------------------------


def moved_off_their_start(model: nn.Module) -> None:
    """Norms that are not the identity, so that one left out or in another place is seen."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.weight, module.running_var, module.bias, module.running_mean):
                assert value is not None
                nn.init.uniform_(value, 0.5, 1.5)


def test_densenet_joins_all_that_came_before() -> None:
    """As the paper writes it: layer n sees [x0, x1, …, xn-1]. Ours joins two tensors at a time."""
    model, x = zoo.build("densenet121", **SMALL["densenet121"]).eval(), example("densenet121", 2)[0]
    moved_off_their_start(model)
    scores = model(x)
    widths = []
    for name, module in model.get_submodule("features").named_children():
        if not name.startswith("denseblock"):
            x = module(x)
            continue
        seen = [x]
        for layer in module.children():
            assert isinstance(layer, DenseLayer)
            joined = layer.conv1(layer.norm1(torch.cat(seen, 1)).relu())
            seen.append(layer.conv2(layer.norm2(joined).relu()))
        x = torch.cat(seen, 1)
        widths.append(x.shape[1])
    assert widths == [64, 128, 256, 256]
    torch.testing.assert_close(scores, model.get_submodule("classifier")(x.relu().mean((2, 3))))


def test_mobilenet_v1_computes_what_hugging_face_computes() -> None:
    """But for padding on all sides and the epsilon, which are timm's. Its modules are in the same order as ours."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MobileNetV1Config(
        depth_multiplier=0.25, tf_padding=False, layer_norm_eps=1e-5, num_labels=5, image_size=32
    )
    theirs = transformers.MobileNetV1ForImageClassification(config).eval()
    moved_off_their_start(theirs)
    ours = zoo.build("mobilenet_v1", **SMALL["mobilenet_v1"]).eval()
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = example("mobilenet_v1", 2)[0]
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "layers", "heads"), [("bert_small", 4, 2), ("bert_base", 12, 2)])
def test_bert_computes_what_hugging_face_computes(name: str, layers: int, heads: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=256 * heads,
        num_labels=3,
    )
    theirs = transformers.BertForSequenceClassification(config).eval()
    ours = zoo.build(name, **SMALL[name]).eval()
    ours.load_state_dict(theirs.state_dict())
    tokens = example(name, 4)[0]
    tokens[1, 7:] = 0  # padding
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=(tokens != 0).long()).logits
        torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=1e-4)
