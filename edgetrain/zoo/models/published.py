"""What others have printed about these networks, and why it differs from ours where it does.

Numbers stand as printed: 3_400_000 for "3.4M". Torchvision's multiply-adds are the `_ops` of its weights, in
thousandths of a giga; it calls them GFLOPS but counts one multiplication with its addition as one.

Two of the measurement papers count in ways of their own:
- EMDL'21 names five CNNs with their counts. The code its authors released
  (github.com/UbiquitousLearning/Benchmark-On-Device-Training) builds other networks for at least four of
  them.
- The TX2 paper's column "#Parameters" agrees for several networks with the *megabytes* of float32 parameters
  in a public table (github.com/albanie/convnet-burden), and its column "#Flops" with the multiply-adds there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TORCHVISION = "torchvision 0.13 and later, weights meta"
EMDL = "EMDL'21, section 2.1"
TX2 = "TX2 characterization, Table II"
POET = "POET, released code (github.com/ShishirPatil/poet)"


@dataclass(frozen=True)
class Published:
    """One printed count. `note` is empty where it agrees with ours, up to the digits that were printed."""

    source: str
    parameters: int
    multiply_adds: int | None = None
    note: str = ""


_LENET = (
    Published(
        "LeCun et al. 1998",
        60_000,
        340_908,
        "The original joins each map of its second convolution to a few maps of the first, has trainable "
        "subsampling and fixed output units, and counts connections, biases among them. Ours, fully "
        "connected, has 61,706 parameters and 416,520 multiply-adds.",
    ),
    Published(
        EMDL,
        3_200,
        None,
        "Fewer than any LeNet has: our two convolutions alone have 2,572 and the dense layers 59,134. "
        "The released code builds Caffe's LeNet (20 and 50 filters, 400 hidden units): 349,980.",
    ),
)

_ALEXNET = (
    Published(TORCHVISION, 61_100_840, 714_000_000),
    Published(
        EMDL,
        61_000_000,
        None,
        "Agrees with ours. The released code builds another network (96, 256, 384, 384 and 256 filters, "
        "one dense layer fewer, 10 classes): 30,006,666.",
    ),
    Published(TX2, 60_000_000, 727_000_000, "The two-tower network of 2012 at 227×227."),
)

_VGG16 = (
    Published(TORCHVISION, 138_357_544, 15_470_000_000),
    Published("Simonyan and Zisserman 2015, Table 2", 138_000_000),
    Published(
        TX2,
        134_000_000,
        4_000_000_000,
        "For 10 classes: ours then has 134,301,514, dense layers for 7×7 included. Here the column is not in "
        "megabytes. Its multiply-adds are those of neither size: ours has 15.5 G at 224×224 and 0.43 G at 32×32.",
    ),
)

_VGG16_CIFAR = (
    Published(POET, 33_638_218),
    Published(
        "github.com/weiaicunzai/pytorch-cifar100 (vgg16_bn)",
        34_000_000,
        None,
        "With batch norm and 100 classes: ours then has 34,006,948 without the 8,448 of batch norm.",
    ),
)

_MOBILENET_V1 = (
    Published("Howard et al. 2017, Table 8", 4_200_000, 569_000_000),
    Published("timm (mobilenetv1_100)", 4_230_000),
    Published(
        "Keras (MobileNet)",
        4_253_864,
        None,
        "Counts the 21,888 running means and variances of batch norm, which are not trained, as parameters.",
    ),
)

_MOBILENET_V2 = (
    Published(TORCHVISION, 3_504_872, 301_000_000),
    Published(
        "Sandler et al. 2018, Table 4",
        3_400_000,
        300_000_000,
        "Ours has 3,470,760 without the 34,112 of batch norm: the paper's figure, cut after two digits.",
    ),
    Published(
        EMDL,
        3_400_000,
        None,
        "The figure of Sandler et al. Its 53 convolutions are our 52 and the dense layer.",
    ),
)

_SQUEEZENET = (
    Published(TORCHVISION + " (squeezenet1_1)", 1_235_496, 349_000_000),
    Published(
        "Iandola et al. 2016",
        1_248_424,
        None,
        "Version 1.0: 7×7 first convolution with 96 filters where 1.1 has 3×3 with 64.",
    ),
    Published(
        EMDL,
        411_200,
        None,
        "No SqueezeNet has so few: the eight Fire modules of 1.1 alone have 720,704. The released code "
        "builds version 1.0 for 10 classes: 740,554. Its 18 convolutions count the two expand layers of a "
        "Fire module as one.",
    ),
    Published(TX2, 5_000_000, 837_000_000, "Version 1.0, and 5 MB of parameters, not 5 million."),
)

_GOOGLENET = (
    Published(TORCHVISION, 6_624_904, 1_498_000_000),
    Published(
        "torchvision with auxiliary classifiers",
        13_004_888,
        None,
        "The two auxiliary classifiers have 6,379,984; they are off here unless asked for.",
    ),
    Published(
        EMDL,
        6_800_000,
        None,
        "The sum of Table 1 of Szegedy et al. 2015. The 5×5 kernels there have 380,928 weights more than "
        "torchvision's 3×3 ones; batch norm instead of biases adds 7,280. The released code has no batch "
        "norm, one convolution fewer and 10 classes: 5,979,642.",
    ),
    Published(
        TX2 + " (InceptionV1)",
        5_000_000,
        30_000_000,
        "For CIFAR-10: ours at 32×32 with 10 classes has 5,610,154 and 30,568,448 multiply-adds.",
    ),
)

_RESNET18 = (Published(TORCHVISION, 11_689_512, 1_814_000_000),)

_RESNET18_CIFAR = (
    Published(
        "github.com/weiaicunzai/pytorch-cifar100 (resnet18)",
        11_200_000,
        None,
        "For 100 classes: ours then has 11,220,132.",
    ),
    Published(
        POET,
        248_746,
        None,
        "Another network of the same name, which is no ResNet-18: 16, 32 and 64 channels in six blocks, a 3×3 "
        "convolution beside each block, biases, and four numbers a channel of batch norm.",
    ),
)

_RESNET50 = (
    Published(TORCHVISION, 25_557_032, 4_089_000_000),
    Published(TX2, 98_000_000, 4_000_000_000, "98 MB of parameters, not 98 million."),
)

_DENSENET121 = (Published(TORCHVISION, 7_978_856, 2_834_000_000),)

_CHAR_LSTM = (
    Published(
        "McMahan et al. 2017, Shakespeare",
        866_578,
        None,
        "The same layers, over a number of characters that the paper does not give. Ours has 798,720 "
        "parameters and 265 more for each character (815,945 for 65): 866,578 for no number of characters.",
    ),
)

_BERT_SMALL = (
    Published(
        "Turc et al. 2019, 4 layers of 512",
        28_800_000,
        None,
        "28,763,648 without the classifier, which adds 513 for each class.",
    ),
)

_BERT_BASE = (
    Published(
        "Hugging Face (BertModel, bert-base-uncased)",
        109_482_240,
        None,
        "Embeddings, layers and pooler, without heads. Our classifier adds 769 for each class.",
    ),
    Published("Devlin et al. 2019", 110_000_000, None, "Rounded up: 109,482,240 without heads."),
    Published(TX2, 110_000_000, None, "The figure of Devlin et al."),
)

PUBLISHED: Mapping[str, tuple[Published, ...]] = {
    "lenet": _LENET,
    "alexnet": _ALEXNET,
    "vgg16": _VGG16,
    "vgg16_cifar": _VGG16_CIFAR,
    "mobilenet_v1": _MOBILENET_V1,
    "mobilenet_v2": _MOBILENET_V2,
    "squeezenet": _SQUEEZENET,
    "googlenet": _GOOGLENET,
    "resnet18": _RESNET18,
    "resnet18_cifar": _RESNET18_CIFAR,
    "resnet50": _RESNET50,
    "densenet121": _DENSENET121,
    "char_lstm": _CHAR_LSTM,
    "bert_small": _BERT_SMALL,
    "bert_base": _BERT_BASE,
    "autoencoder": (),  # the sizes are this project's own
    "ds_cnn": (),  # its paper prints bytes, of weights and activations together
    "minilearn_kws": (),
    "minilearn_cifar": (),
    "minilearn_har": (),  # published as code, without counts
}
