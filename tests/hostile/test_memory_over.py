"""Attacks on the bytes: nets and budgets drawn at random, in processes of their own, which must never hold more than
the plan says and what preparing is allowed; many shapes, which must leave nothing; the peak, counted a second time.

`EDGETRAIN_EXAMPLES` asks for more nets.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import edgetrain as et
from edgetrain.graph.ir import PERSISTENT
from edgetrain.plan.plan import RANDOM_STATE_BYTES, Compute, Free, PageIn
from edgetrain.run.micro_step import MicroStep
from edgetrain.run.step import Step

EXAMPLES = int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 30
ALLOWED_BYTES = 150_000_000
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

HEAD = """
import gc, json, os, random, sys, threading, time
import torch
from torch import nn
from torch.nn import functional as F
import edgetrain as et

torch.set_num_threads(1)

def pids():
    found, waiting = [], [os.getpid()]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                waiting += map(int, open(f"/proc/{pid}/task/{task}/children").read().split())
        except OSError:
            pass
    return found

def pss(pid):
    try:
        return sum(int(l.split()[1]) * 1024 for l in open(f"/proc/{pid}/smaps_rollup") if l.startswith("Pss:"))
    except OSError:
        return 0

class Peak:
    '''The most that this process and those below it held at one time, above what was there before.'''
    def __enter__(self):
        gc.collect()
        self.before = self.most = sum(map(pss, pids()))
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.over.wait(0.01):
            self.most = max(self.most, sum(map(pss, pids())))
    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
    @property
    def grown(self):
        return self.most - self.before
"""

NETS = """
class LoRA(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(n, m), nn.Linear(n, 4, bias=False), nn.Linear(4, m, bias=False)
        self.base.requires_grad_(False)
    def forward(self, x):
        return self.base(x) + self.b(self.a(x))

def net(draw):
    kind = draw.choice(("wide", "lora", "deep", "images", "vocabulary"))
    if kind == "wide":
        n = draw.choice((512, 3000))
        return nn.Sequential(nn.Linear(64, n), nn.ReLU(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 8)), (256, 64)
    if kind == "lora":
        return nn.Sequential(*(m for _ in range(6) for m in (LoRA(1500, 1500), nn.GELU(), nn.Dropout(0.1)))), (64, 1500)
    if kind == "deep":
        return nn.Sequential(*(m for _ in range(99) for m in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)))), (99, 64)
    if kind == "images":
        layers = [m for i in range(4) for m in (nn.Conv2d(12 if i else 3, 12, 3), nn.BatchNorm2d(12), nn.ReLU())]
        return nn.Sequential(*layers), (8, 3, 64, 64)
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 100_000)), (4, 32)
"""

OVER = (
    HEAD
    + NETS
    + """
draw = random.Random(int(sys.argv[1]))
torch.manual_seed(0)
model, shape = net(draw)
parameters = [p for p in model.parameters() if p.requires_grad]
optimizer = draw.choice((torch.optim.SGD, torch.optim.AdamW))(parameters, lr=1e-3)
x = torch.randn(shape)
loss = lambda m, x: m(x).square().mean()
part = draw.choice((None, 0.9, 0.5))
options = {}
if part is not None:
    plan = et.keep_all(et.capture(model, loss, optimizer, (x,)))
    above = plan.peak_bytes - plan.persistent_bytes
    options = dict(memory=plan.persistent_bytes + int(part * above), plan_time_s=1.0)
    try:
        et.prepare(model, loss, optimizer, (x,), **options)
    except et.Infeasible as answer:
        options["memory"] = answer.smallest_bytes
with Peak() as preparing:
    step = et.prepare(model, loss, optimizer, (x,), **options)
state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
with Peak() as first:
    step(x)
state = sum(t.nbytes for s in optimizer.state.values() for t in s.values()) - state
above = step.plan.peak_bytes - step.plan.persistent_bytes
served = None if step.used.arena is None else step.used.arena.most_bytes
print(json.dumps(dict(preparing=preparing.grown, first=first.grown - state, above=above, served=served, budget=part,
                      kept=part is None or step.plan.peak_bytes <= options["memory"])))
"""
)


def child(script: str, *arguments: object, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"EDGETRAIN_CACHE": "off"} | environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@linux_only
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_preparing_and_the_first_step_take_no_more_than_the_plan_and_what_is_allowed(seed: int) -> None:
    found = child(OVER, seed)
    assert found["kept"]
    assert found["preparing"] <= found["above"] + ALLOWED_BYTES, found
    assert found["first"] <= found["above"] + ALLOWED_BYTES, found
    if found["budget"] is not None and found["served"] is not None:
        assert found["served"] == found["above"], found


COLUMNS = (
    HEAD
    + """
layers, shape, dtype = eval(sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
torch.manual_seed(0)
model = nn.Sequential(*layers).to(dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(shape, dtype=dtype)
with Peak() as preparing:
    step = et.prepare(model, lambda m, x: m(x).square().mean(), optimizer, (x,))
above = step.plan.peak_bytes - step.plan.persistent_bytes
with Peak() as first:
    step(x)
with Peak() as later:
    for _ in range(3):
        step(x)
print(json.dumps(dict(preparing=preparing.grown, first=first.grown, above=above, served=step.used.arena.most_bytes,
                      later=later.grown + later.before - first.before)))
"""
)
LAYERS = {
    "two": "[nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 32, 7, padding=3)], (4, 16, 96, 96)",
    "one": "[nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 32, 7, padding=3)], (1, 16, 180, 180)",
    "stride": "[nn.Conv2d(16, 48, 7, stride=2), nn.Tanh(), nn.Conv2d(48, 16, 5)], (4, 16, 128, 128)",
    "groups": "[nn.Conv2d(16, 32, 5), nn.ReLU(), nn.Conv2d(32, 32, 7, groups=4)], (4, 16, 96, 96)",
    "1d": "[nn.Conv1d(16, 32, 49), nn.ReLU(), nn.Conv1d(32, 32, 49)], (8, 16, 4000)",
    "3d": "[nn.Conv3d(8, 8, 5), nn.ReLU(), nn.Conv3d(8, 8, 5)], (2, 8, 30, 30, 30)",
    "transposed": "[nn.ConvTranspose2d(16, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 8, 5)], (4, 16, 48, 48)",
    "dilated": "[nn.Conv2d(16, 32, 5, dilation=2), nn.ReLU(), nn.Conv2d(32, 32, 5)], (4, 16, 96, 96)",
    "wide": "[nn.Conv1d(4, 4, 1025, padding=512), nn.ReLU(), nn.Conv1d(4, 4, 1025)], (2, 4, 20_000)",
    "few": "[nn.ConvTranspose3d(3, 3, 5, dilation=3), nn.ReLU(), nn.ConvTranspose3d(3, 3, 5)], (2, 3, 40, 40, 40)",
    "depthwise": "[nn.Conv2d(8, 16, 16, groups=8), nn.ReLU(), nn.Conv2d(16, 16, 16, groups=16)], (2, 8, 120, 97)",
}


@linux_only
@pytest.mark.parametrize(
    ("layers", "dtype", "threads", "beside"),
    [
        *((name, "float64", 1, 0) for name in LAYERS if name not in ("one", "wide", "few")),
        ("wide", "float32", 1, 0), ("few", "float32", 2, 0),
        ("two", "float64", 2, 0), ("one", "float64", 1, 400_000_000), ("one", "float64", 2, 400_000_000),
        ("two", "float32", 2, 0), ("transposed", "float32", 1, 0),
    ],
)  # fmt: skip
def test_what_kernels_take_is_in_the_plan_without_a_budget_too(
    layers: str, dtype: str, threads: int, beside: int
) -> None:
    """beside: what they may take from malloc, beside the arena."""
    found = child(COLUMNS, f"({LAYERS[layers]}, torch.{dtype})", threads)
    assert found["served"] <= found["above"] <= found["served"] + beside, found
    assert found["later"] <= found["above"] + ALLOWED_BYTES, found
    assert found["preparing"] <= found["above"] + ALLOWED_BYTES, found
    assert found["first"] <= found["above"] + ALLOWED_BYTES, found


PARTS = (
    HEAD
    + """
what = json.loads(sys.argv[1])
torch.manual_seed(0)
if what["net"] == "wide":
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(4096, 4096), nn.ReLU())))
    x = torch.randn(8, 4096)
elif what["net"] == "vocabulary":
    model = nn.Sequential(nn.Embedding(60_000, 512), nn.Linear(512, 60_000))
    x = torch.randint(60_000, (8, 2))
else:  # activations of 25 MB a sample
    model = nn.Sequential(*(m for i in range(12) for m in (nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.Tanh())))
    x = torch.randn(4, 3, 256, 256)
optimizer = getattr(torch.optim, what["optimizer"])(model.parameters(), lr=1e-3)
options, step = what["options"], None
begin = time.monotonic()
with Peak() as preparing:
    try:
        step = et.prepare(model, lambda m, x: m(x).square().mean(), optimizer, (x,), **options)
    except et.Infeasible:
        pass
time_s, above, first = time.monotonic() - begin, 0, Peak()
if step is not None:
    above = step.plan.peak_bytes - step.plan.persistent_bytes
    with first:
        step(x)
    lasts = 4 * sum(p.numel() for p in model.parameters())  # the sums of the gradients
    lasts += sum(t.nbytes for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))
print(json.dumps(dict(preparing=preparing.grown, above=above, time_s=time_s,
                      first=first.grown - lasts if step is not None else 0)))
"""
)


@linux_only
@pytest.mark.parametrize(
    ("net", "optimizer", "options"),
    [
        ("wide", "SGD", {"micro_batches": 2}), ("vocabulary", "Adam", {"micro_batches": 4, "memory": "4GB"}),
        ("images", "Adam", {"micro_batches": 2}), ("vocabulary", "SGD", {"memory": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_the_test_for_micro_batches_takes_no_more_than_is_allowed(
    net: str, optimizer: str, options: dict[str, Any]
) -> None:
    found = child(PARTS, json.dumps({"net": net, "optimizer": optimizer, "options": options}))
    assert found["preparing"] <= found["above"] + ALLOWED_BYTES, found
    assert found["first"] <= found["above"] + ALLOWED_BYTES, found


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"memory": 10_000}], ids=str)
def test_the_arena_of_a_step_in_micro_batches_serves_what_the_plan_says(options: dict[str, Any]) -> None:
    """To the byte: the first micro-batch begins the sums, later ones add to them."""
    model = nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(3, 1), torch.tensor([0, 1, 1])
    step = et.prepare(
        model, lambda m, x, y: functional.cross_entropy(m(x), y), optimizer, batch, micro_batches=3, **options
    )
    for _ in range(2):
        step(*batch)
        assert isinstance(step.used, MicroStep)
        assert step.used.most_bytes is not None
        assert 0 < step.used.most_bytes <= step.plan.peak_bytes - step.plan.persistent_bytes


SHAPES = (
    HEAD
    + """
model = nn.Sequential(
    nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 4)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = json.loads(sys.argv[1])
def batch(n):
    return torch.randn(4, 2, 8 + n % 12, 8 + n // 12), torch.arange(4) % 4
step = et.prepare(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, batch(0), max_shapes=4, **options)
def held():  # without files, of which other processes have their part
    gc.collect()
    rows = (line.split() for line in open("/proc/self/smaps_rollup"))
    return sys.getallocatedblocks(), sum(int(row[1]) * 1024 for row in rows if row[0] == "Pss_Anon:")
first = None
for n in range(1, 60):
    step(*batch(n))
    first = held() if n == 23 else first
last = held()
print(json.dumps(dict(blocks=last[0] - first[0], bytes=last[1] - first[1], kept=len(step._variants))))
"""
)


@linux_only
@pytest.mark.parametrize("options", [{}, {"memory": "1MB"}], ids=["keep-all", "budget"])
def test_many_shapes_leave_nothing_behind(options: dict[str, Any]) -> None:
    few = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}  # full before the counting begins
    found = child(SHAPES, json.dumps(options), **few)
    assert found["kept"] == 4
    assert found["blocks"] < 36 * 20, found  # less than 20 objects a shape: one more op in a later shape, no more
    assert found["bytes"] < 36 * 30_000, found


# ---- the peak, counted a second time ------------------------------------------------------------------------------


def counted(step: Step) -> list[tuple[str, int, set[str]]]:
    """Each op that runs: its name, the bytes held meanwhile but for the workspace, the names of what is alive."""
    graph, plan = step.graph, step.plan
    name = {tensor.storage: tensor.name for tensor in reversed(graph.tensors)}
    lasting = {s for s, storage in enumerate(graph.storages) if storage.role in PERSISTENT}
    alive, noted, undo = set(lasting), set[int](), RANDOM_STATE_BYTES if any(op.random for op in graph.ops) else 0
    rows = []
    for action in plan.schedule:
        if isinstance(action, Free):
            alive.discard(action.storage)
        elif isinstance(action, PageIn):
            alive.add(action.storage)
        elif isinstance(action, Compute):
            op = graph.ops[action.op]
            if action.op not in noted and (op.phase != "update" or plan.updates == "guarded"):
                undo += sum(graph.storages[s].n_bytes for s in op.writes if s in lasting)
            noted.add(action.op)
            alive -= {action.into} if action.into is not None else set()
            alive |= {graph.tensors[t].storage for t in op.creates}
            rows.append((op.name, undo + sum(graph.storages[s].n_bytes for s in alive), {name[s] for s in alive}))
    return rows


def random_net(draw: random.Random) -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    width = draw.choice((8, 64))
    for _ in range(draw.randint(2, 5)):
        kinds: list[nn.Module] = [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.Dropout(0.2)]
        kinds += [nn.ReLU(), nn.GroupNorm(2, width), nn.Conv2d(width, width, 5, padding=2, groups=width)]
        layers += draw.sample(kinds, draw.randint(1, 4))
    layers += [nn.Conv2d(width, 2, 1)]
    return nn.Sequential(*layers).double(), torch.randn(2, width, 9, 7, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(6 * EXAMPLES))
def test_the_peak_is_where_a_second_count_finds_it(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, x = random_net(draw)
    optimizer = draw.choice((torch.optim.SGD, torch.optim.Adam))(model.parameters(), lr=0.1)
    step = et.prepare(model, lambda m, x: m(x).square().mean(), optimizer, (x,), memory_format="preserve")
    trace = step.trace_memory(x)
    rows = counted(step)
    assert [(op.name, op.during_bytes) for op in trace.ops] == [row[:2] for row in rows]
    totals = [held + op.workspace_bytes for (_, held, _), op in zip(rows, trace.ops, strict=True)]
    at = totals.index(max(totals))
    assert (trace.peak_op, trace.peak_with_workspace_bytes) == (rows[at][0], totals[at])
    assert sum(alive.n_bytes for alive in trace.alive) == totals[at]
    assert {a.name for a in trace.alive if a.role not in ("undo", "workspace")} == rows[at][2]
    assert sum(a.n_bytes for a in trace.alive if a.role == "workspace") == trace.ops[at].workspace_bytes
    assert trace.peak_bytes == max(held for _, held, _ in rows) == step.plan.peak_bytes
    assert f"at {trace.peak_op}" in str(trace)


def test_the_random_state_is_as_large_as_it_is_counted(tmp_path: Path) -> None:
    assert torch.get_rng_state().nbytes == RANDOM_STATE_BYTES
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in ({}, {"memory": "1MB"}):
        step = et.prepare(model, lambda m, x: m(x).sum(), optimizer, (x,), **options)  # type: ignore[arg-type]
        assert step.plan.undo_bytes >= RANDOM_STATE_BYTES
        step(x)
        if step.used.arena is not None:
            assert step.used.arena.most_bytes == step.plan.peak_bytes - step.plan.persistent_bytes
