"""What measuring takes: weights are read where they lie, and the arguments of a large update lie over each other."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import edgetrain as et
from edgetrain import child
from edgetrain.costs import calls
from edgetrain.graph.ir import Graph
from edgetrain.ops.update import overwrites_gradient
from edgetrain.run.binding import live_storages

WIDE = 2000


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.last(torch.tanh(self.first(x)))
        return value.square().mean()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x)
    return value


def captured() -> tuple[Net, torch.optim.Optimizer, Graph]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, et.capture(model, loss, optimizer, (torch.randn(4, WIDE),))


def test_weights_are_read_where_they_lie_and_nothing_of_them_is_changed() -> None:
    model, optimizer, graph = captured()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    live = live_storages(graph, model, optimizer, {})
    pool, weight = calls.Pool(graph, live), model.first.weight
    scratch = overwrites_gradient(graph)
    reading = 0
    for number, op in enumerate(graph.ops):
        for call in calls.calls(graph, number, scratch).values():
            tensors = pool.tensors(call)
            shared = [t for t in tensors.values() if t.data_ptr() == weight.data_ptr()]
            assert all(t.untyped_storage().nbytes() == weight.nbytes for t in shared)
            if op.phase == "update":
                assert not shared  # it is changed
            if shared:
                reading += 1
                assert calls.read_bytes(graph, call, live) < weight.nbytes
            with torch.no_grad():
                calls.function(graph, call, tensors)()
    assert reading
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_arguments_of_an_update_overlap_where_there_is_no_room() -> None:
    model, _, graph = captured()
    number = next(n for n, op in enumerate(graph.ops) if op.phase == "update")
    (call,) = (c for way, c in calls.calls(graph, number, overwrites_gradient(graph)).items() if way == "first")
    one = model.first.weight.nbytes
    assert calls.read_bytes(graph, call, {}) > 3 * one
    assert calls.read_bytes(graph, call, {}, most_bytes=2 * one) <= 1.01 * one
    tensors = calls.Pool(graph).tensors(call, 2 * one)
    with torch.no_grad():
        calls.function(graph, call, tensors)()


@pytest.mark.parametrize("error", [MemoryError, ImportError, OSError])
def test_a_process_without_memory_ends_and_is_no_defect(error: type[BaseException]) -> None:
    def fails() -> Any:
        raise error("cannot map zero-fill pages")

    with pytest.raises(child.Ended):
        child.forked(fails, most_bytes=1 << 30)


def test_a_plan_says_that_the_search_had_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGETRAIN_CACHE", "off")
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(32, 32), nn.Tanh())))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(200, 32)
    small = lambda m, x: m(x).square().mean()  # noqa: E731
    kept = et.keep_all(et.capture(model, small, optimizer, (x,)))
    forked = child.forked
    monkeypatch.setattr(child, "forked", lambda work, **_: forked(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    step = et.prepare(model, small, optimizer, (x,), memory=int(kept.peak_bytes * 0.9))
    assert step.plan.planner == "fast"
    assert "lack of memory" in str(step.plan)
