"""Random programs: captured, planned and run, they give bitwise the numbers of plain PyTorch.

A program is a list of instructions over a list of values, drawn by Hypothesis and run by an nn.Module: linear layers,
element-wise ops, views, in-place writes (through views too), batch norm and dropout, in any order and with values used
again at any distance. `make soak` asks for thousands of them.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import edgetrain as et
from edgetrain.graph.verify import verify
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.plan import Updates
from edgetrain.plan.validate import validate
from edgetrain.run.layouts import LayoutMismatch

WIDTH, BATCH = 4, 3
EXAMPLES = int(os.environ.get("EDGETRAIN_EXAMPLES", "60"))

ONE = (
    "relu",
    "relu6_",
    "sigmoid",
    "tanh_",
    "linear",
    "tied",
    "norm",
    "dropout",
    "transpose",
    "view",
    "clone",
    "detach",
)
TWO = ("add", "mul", "cat", "add_", "write_row", "where")


@dataclass(frozen=True)
class Instruction:
    name: str
    a: int
    b: int


instructions = st.builds(Instruction, st.sampled_from(ONE + TWO), st.integers(0, 99), st.integers(0, 99))


class Program(nn.Module):
    """Every value is [BATCH, WIDTH]. The result is the sum of all values, so that each is reached."""

    def __init__(self, code: list[Instruction]) -> None:
        super().__init__()
        self.code = code
        self.linear = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n, i in enumerate(code) if i.name == "linear"})
        self.norm = nn.ModuleDict({str(n): nn.BatchNorm1d(WIDTH) for n, i in enumerate(code) if i.name == "norm"})
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.first(x)]
        for number, step in enumerate(self.code):
            values.append(self.execute(str(number), step, values[step.a % len(values)], values[step.b % len(values)]))
        return torch.stack(values).sum(0)

    def execute(self, number: str, step: Instruction, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        match step.name:
            case "linear":
                return self.linear[number](a)  # type: ignore[no-any-return]
            case "norm":
                return self.norm[number](a)  # type: ignore[no-any-return]
            case "tied":
                return a @ self.first.weight
            case "dropout":
                return nn.functional.dropout(a, 0.3, self.training)
            case "relu":
                return a.relu()
            case "relu6_":
                return nn.functional.relu6(a * 2, inplace=True)
            case "sigmoid":
                return a.sigmoid()
            case "tanh_":
                return (a + 1).tanh_()
            case "transpose":
                return a.t().contiguous().t() * 1.5
            case "view":
                return a.reshape(-1)[: BATCH * WIDTH].view(BATCH, WIDTH)
            case "clone":
                return a.clone()
            case "detach":
                return a.detach() + b
            case "add":
                return a + b
            case "mul":
                return a * b
            case "cat":
                return torch.cat([a, b], 1)[:, 1 : WIDTH + 1]
            case "add_":
                return (a * 1.0).add_(b, alpha=0.5)
            case "write_row":
                out = a * 0.5
                out[1:] += b[1:]
                out[:, 0] = b[:, 1]
                return out
            case _:
                return torch.where(a > b, a, b * 0.1)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), x)


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, updates: Updates) -> et.CompiledStep:
    graph = et.capture(model, loss, optimizer, (x,), use_cache=False, unused="freeze")
    verify(graph)
    plan = keep_all(graph, updates=updates)
    validate(graph, plan)
    step = et.compile(graph, plan, model, optimizer)
    assert step.trace_memory(x).peak_bytes == plan.peak_bytes  # raises where a byte is not as planned
    return step


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
@given(code=st.lists(instructions, min_size=1, max_size=14), updates=st.sampled_from(["early", "guarded", "together"]))
def test_a_random_program_trains_as_in_plain_pytorch(code: list[Instruction], updates: Updates) -> None:
    torch.manual_seed(0)
    plain = Program(code).double()
    ours = copy.deepcopy(plain)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    sgd = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}
    plain_optimizer = torch.optim.SGD(plain.parameters(), **sgd)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(ours.parameters(), **sgd)  # type: ignore[arg-type]
    step = compiled(ours, optimizer, x, updates)
    for number in range(3):
        torch.manual_seed(number)
        plain_optimizer.zero_grad()
        expected = loss(plain, x)
        expected.backward()
        plain_optimizer.step()
        torch.manual_seed(number)
        try:
            value = step(x)
        except LayoutMismatch:  # it is learnt, nothing has changed, and the next capture knows: what `prepare` does
            step = compiled(ours, optimizer, x, updates)
            torch.manual_seed(number)
            value = step(x)
        assert torch.equal(value, expected.detach())
    for (name, a), b in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
