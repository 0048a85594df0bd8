"""TorchScript: the first capture in a process, after any number of runs, and between them."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.cell = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.layer(x)))
        for _ in range(2):
            x = torch.tanh(self.layer(x)) * torch.sigmoid(x) + x
        out: Tensor = self.cell(x[:, None])[0][:, 0]
        return out


X, Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 4, 5])
NETS = {"linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), "gates": Gates}
FIRST = """
import torch, edgetrain as et
from torch import nn
model = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
x = torch.ones(2, 8)
step = et.prepare(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1), (x,))
step(x)
print(step.plan.exact)
"""


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    value = loss(model, X, Y)
    value.backward()
    optimizer.step()
    return value.detach()


def test_the_first_capture_in_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "rounding", done.stderr


@pytest.mark.parametrize("runs", [0, 1, 3])
@pytest.mark.parametrize("how", ["script", "trace", "part"])
@pytest.mark.parametrize("name", NETS)
def test_scripted_models_train_as_plain_ones(name: str, how: str, runs: int) -> None:
    torch.manual_seed(0)
    net = NETS[name]()
    plain = copy.deepcopy(net)
    model = torch.jit.trace(net, X, check_trace=False) if how == "trace" else torch.jit.script(net)
    if how == "part":
        model, plain = nn.Sequential(model, nn.ReLU()), nn.Sequential(plain, nn.ReLU())
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for _ in range(runs):
        train(model, ours)
        train(plain, theirs)
    step = et.prepare(model, loss, ours, (X, Y))
    assert step.plan.exact == "rounding"
    before = torch._C._jit_get_num_profiled_runs()  # type: ignore[attr-defined]
    for _ in range(3):
        for _ in range(6):  # captured again on the way
            torch.testing.assert_close(step(X, Y), train(plain, theirs), rtol=1e-4, atol=1e-5)
        step.evaluate(X, Y)
        model(X)
        plain.load_state_dict(model.state_dict())  # running statistics
    assert torch._C._jit_get_num_profiled_runs() == before  # type: ignore[attr-defined]


@torch.jit.script
def doubled(x: Tensor) -> Tensor:
    return x * torch.tensor(2.0)


def test_a_tensor_of_numbers_in_a_script_is_refused() -> None:
    """TorchScript would write into memory that is not there."""
    model = nn.Linear(8, 8)
    for runs in (0, 3):
        for _ in range(runs):
            doubled(X)
        with pytest.raises(UserError, match="the scripted function doubled makes a tensor of numbers"):
            et.prepare(model, lambda m, x: doubled(m(x)).mean(), torch.optim.SGD(model.parameters(), 0.1), (X,))
