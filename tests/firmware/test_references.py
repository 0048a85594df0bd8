"""What the firmware's numbers are held against: runs that are equally right and rounded anew, and sides of bends."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgetrain.errors import InternalError
from edgetrain.firmware.references import WAYS, References, Way
from edgetrain.firmware.sides import Seen, Sided
from tests.firmware.firmware_nets import NETS, adam, plain_sgd

ROUNDING = 1e-3  # more than float32 makes of its rounding in these nets, less than a mistake would


@pytest.mark.parametrize("name", ["autoencoder", "lenet", "everything"])
def test_each_run_is_another_draw_of_rounding_and_the_same_function(name: str) -> None:
    torch.manual_seed(0)
    net = NETS[name]
    model = net.build()
    references = References(model, net.loss, adam(list(model.parameters())))
    references.step(net.batch(), [None])
    pairs = references.gradients().pairs
    assert len(pairs) == len(WAYS)
    for single, double in pairs:
        for key, value in double.items():
            torch.testing.assert_close(single[key].double(), value, rtol=0, atol=ROUNDING * float(value.abs().max()))
    weight = next(key for key in pairs[0][0] if key.endswith("weight"))
    for (a, _), (b, _) in itertools.combinations(pairs, 2):
        assert not torch.equal(a[weight], b[weight])


class Small(nn.Module):
    """Depthwise convolutions of small images, which float64 runs do by their taps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=3)
        self.last = nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return result


def test_a_float64_run_has_the_gradients_of_pytorch_in_float64() -> None:
    torch.manual_seed(0)
    model, batch = Small(), (torch.randn(2, 3, 7, 6), torch.randn(2, 3, 4, 4))
    references = References(model, lambda net, x, y: F.mse_loss(net(x), y), plain_sgd(list(model.parameters())))
    references.step(batch, [None])
    exact = model.double()
    F.mse_loss(exact(batch[0].double()), batch[1].double()).backward()
    for name, p in exact.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(references.gradients().exact[0][name], p.grad, rtol=1e-12, atol=1e-15)


class Bent(nn.Module):
    """Every kind of bend, the first two of them next to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1e-9, -1e-9, 0.5, 1.0, 7.0, -3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x * self.weight
        image = F.max_pool2d((F.relu(a) + 2 * F.relu6(a)).reshape(-1, 1, 2, 3), (2, 1))
        return F.hardtanh(image, -4.0, 4.0).flatten(1)


def test_a_run_goes_the_ways_that_it_is_told() -> None:
    model, x, seen = Bent().double(), torch.ones(1, 6, dtype=torch.float64), Seen()
    with seen:
        plain = model(x)
    assert [way.flatten().tolist() for way in seen.ways] == [
        [1, 0, 1, 1, 1, 0], [1, 0, 1, 1, 2, 0], [1, 1, 0], [1, 2, 1],
    ]  # fmt: skip
    same = Sided(seen.ways)
    with same:
        torch.testing.assert_close(model(x), plain)
    reported = [way.clone() for way in seen.ways]
    reported[0][0, 1], reported[1][0, 1] = 1, 1
    other = Sided(reported, [1e-8] * 4)
    with other:
        model(x)
    assert (other.differing, other.refused) == (2, 0)


@pytest.mark.parametrize(("call", "place", "way"), [(0, 2, 0), (0, 5, 1), (1, 4, 1), (1, 3, 2), (2, 0, 0), (2, 0, 9)])
def test_a_way_out_of_reach_is_not_believed(call: int, place: int, way: int) -> None:
    model, x, seen = Bent().double(), torch.ones(1, 6, dtype=torch.float64), Seen()
    with seen:
        plain = model(x)
    reported = [known.clone() for known in seen.ways]
    reported[call].flatten()[place] = way
    sided = Sided(reported, [1e-8] * 4)
    with sided:
        torch.testing.assert_close(model(x), plain, rtol=0, atol=0)
    assert (sided.differing, sided.refused) == (0, 1)


def test_ways_of_another_net_are_refused() -> None:
    net = NETS["mlp"]
    model = net.build()
    references = References(model, net.loss, plain_sgd(list(model.parameters())), ways=WAYS[:1])
    with pytest.raises(InternalError, match="2 functions with bends, the model 1"):
        references.step(net.batch(), [[torch.zeros(4, 9, dtype=torch.uint8)] * 2])
    with pytest.raises(InternalError, match="not the one whose sides are known"):
        references.step(net.batch(), [[torch.zeros(4, 8, dtype=torch.uint8)]])


def test_calls_in_place_by_name_and_with_places_are_seen_as_well() -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 3, 3).double(), nn.Conv2d(3, 3, 1).double()

    def passed(x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        y = second(F.relu(x, inplace=True))  # x is what it was bent to from here on
        pooled, _ = F.max_pool2d(F.relu(input=x + y), 2, return_indices=True)
        return pooled.square().sum()

    x = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    with Seen() as seen:
        (plain,) = torch.autograd.grad(passed(x), first.weight)
    with Sided(seen.ways) as sided:
        (gradient,) = torch.autograd.grad(passed(x), first.weight)
    assert torch.equal(plain, gradient)
    assert len(seen.ways) == len(sided.ways) == 3


def test_a_shuffled_run_takes_lists_as_it_takes_pairs() -> None:
    torch.manual_seed(0)

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2, 2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.conv2d(x, self.weight, None, [1, 2], [2, 1], [2, 1])

    model = Listed()
    references = References(
        model, lambda net, x: net(x).square().sum(), torch.optim.SGD(model.parameters(), 0.1), ways=(Way(shuffle=1),)
    )
    references.step((torch.randn(2, 2, 7, 7),), [None])
    ((single, double),) = references.gradients().pairs
    assert torch.allclose(single["weight"].double(), double["weight"], rtol=1e-5)
