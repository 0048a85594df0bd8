"""Instructions of a training step on a Cortex-M4F: op by op, exactly, for five nets.

In:  lenet at half width, DS-CNN for keywords, MobileNetV2 at width 0.35 and 64×64 pixels, a dense autoencoder, and the
     convolutions that those four do not have: 5×5 depthwise, two 3×3 filters a channel, groups.
Out: firmware.json beside this file: instructions of a step, and of each product (dense layer, convolution) the
     instructions a multiply-add. They are counted by QEMU, so two runs give the same file.

    python -m benchmarks.firmware [--out FILE] [NET…]                                           about 1 minute
    edgetrain compare benchmarks/firmware.json new.json          what has become more than 2 % slower, as an exit code

Multiply-adds are counted as everywhere: a tap that lies on padding is one too, although no kernel computes it. The
emulated core is that of the nrf52840; the board has 16 MB of RAM, since only lenet would fit into the real one's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import edgetrain as et
from edgetrain.devices.device import Quantity, Region
from edgetrain.firmware.counts import CountedCall
from edgetrain.firmware.emulate import Run, run_firmware
from edgetrain.firmware.target import Target, load_target
from edgetrain.measure.counts import KEY, SCHEMA
from edgetrain.zoo.models.autoencoder import autoencoder
from edgetrain.zoo.models.lenet import lenet
from edgetrain.zoo.models.mobilenet_v2 import mobilenet_v2

KEPT = Path(__file__).parent / "firmware.json"
SEED = 0


@dataclass(frozen=True)
class Net:
    """classes: None where the net rebuilds its input."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    classes: int | None = 10


def keywords() -> nn.Module:
    """DS-CNN, the small one (Zhang et al. 2017): 10×4 over 49×10 MFCCs, then four depthwise separable blocks."""

    def normed(layer: nn.Conv2d) -> list[nn.Module]:
        return [layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU()]

    layers = normed(nn.Conv2d(1, 64, (10, 4), stride=2, padding=(5, 1), bias=False))
    for _ in range(4):
        layers += normed(nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False))
        layers += normed(nn.Conv2d(64, 64, 1, bias=False))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 12))


def grouped() -> nn.Module:
    """Convolutions of 24 channels of 16×16 places in groups: 5×5 depthwise at strides 1 and 2, two filters a channel,
    and three groups of eight channels."""
    return nn.Sequential(
        nn.Conv2d(3, 24, 1), nn.ReLU(), nn.Conv2d(24, 24, 5, padding=2, groups=24), nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1, groups=3), nn.ReLU(), nn.Conv2d(24, 48, 3, padding=1, groups=24), nn.ReLU(),
        nn.Conv2d(48, 24, 1), nn.ReLU(), nn.Conv2d(24, 24, 5, padding=2, stride=2, groups=24),
        nn.ReLU(), nn.Flatten(), nn.Linear(24 * 8 * 8, 12),
    )  # fmt: skip


NETS = {
    "lenet": Net(lambda: lenet(width=0.5), (1, 28, 28), 4),
    "ds_cnn": Net(keywords, (1, 49, 10), 4, 12),
    "mobilenet_v2": Net(lambda: mobilenet_v2(width=0.35, classes=10, input_size=64), (3, 64, 64), 4),
    "autoencoder": Net(lambda: autoencoder(width=0.5), (1, 28, 28), 4, None),
    "grouped": Net(grouped, (3, 16, 16), 4, 12),
}


def roomy_m4f() -> Target:
    """The nrf52840 with the memory that the emulated board has: 4 MB for the program, 16 MB of RAM."""
    target = load_target("nrf52840")
    source = "QEMU documentation: Arm MPS2 AN386"
    ram = Region("PSRAM", Quantity(16 * 2**20, source), 0x21000000)
    flash = Region("SSRAM1", Quantity(4 * 2**20, source), 0x00000000)
    device = replace(target.device, memory=replace(target.device.memory, ram=(ram,), flash=(flash,)))
    return replace(target, device=device, firmware=replace(target.firmware, stack_bytes=16384))


def run_step(net: Net, folder: Path) -> Run:
    """One training step in the emulator."""
    torch.manual_seed(SEED)
    model = net.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(net.batch, *net.shape)
    batch = (x,) if net.classes is None else (x, torch.randint(0, net.classes, (net.batch,)))

    def loss(model: nn.Module, x: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), labels[0]) if labels else F.mse_loss(model(x), x)

    graph = et.lower_for_firmware(et.capture(model, loss, optimizer, batch, use_cache=False))
    plan = et.keep_all(graph, updates="final")
    et.export(graph, plan, model, optimizer, target=roomy_m4f(), out=folder, predict=False)
    return run_firmware(folder, [batch])


def figures(run: Run) -> dict[str, Any]:
    """What is kept of a step."""
    products = [call for call in run.calls if call.multiply_adds]
    return {
        "instructions": sum(call.instructions for call in run.calls),
        "kernels": {kind.removeprefix("edgetrain."): _rate(products, kind) for kind in dict.fromkeys(kinds(products))},
        "ops": {
            f"{call.module} {call.kind.removeprefix('edgetrain.')}": {
                "instructions": call.instructions,
                "multiply_adds": call.multiply_adds,
                "instructions_per_multiply_add": round(call.instructions / call.multiply_adds, 3),
            }
            for call in products
        },
    }


def kinds(calls: list[CountedCall]) -> Iterator[str]:
    return (call.kind for call in calls)


def _rate(calls: list[CountedCall], kind: str) -> float:
    """Instructions a multiply-add over all layers of the net that the kernel serves."""
    own = [call for call in calls if call.kind == kind]
    return round(sum(call.instructions for call in own) / sum(call.multiply_adds for call in own), 3)


def measure(names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            found[name] = figures(run_step(NETS[name], Path(place) / "fw"))
        for line in shown(name, found[name]):
            print(line, flush=True)
    return {KEY: SCHEMA, "about": about(), "nets": found}


def about() -> dict[str, str]:
    """What the counts depend on, beside the code: the compiler."""
    compiler = load_target("nrf52840").firmware.compiler
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    return {"core": "Cortex-M4F", "compiler": version.splitlines()[0]}


def shown(name: str, net: dict[str, Any]) -> Iterator[str]:
    yield f"{name}: {net['instructions']} instructions a step; a multiply-add of all layers of a kernel:"
    yield from (f"  {rate:6.2f}  {kernel}" for kernel, rate in net["kernels"].items())
    for op, one in net["ops"].items():
        yield f"  {one['instructions_per_multiply_add']:6.2f} a multiply-add  {one['multiply_adds']:>10}  {op}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nets", nargs="*", choices=[*NETS, []], help="all of them unless some are named")
    parser.add_argument("--out", type=Path, default=KEPT)
    given = parser.parse_args()
    found = measure(given.nets or list(NETS))
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
