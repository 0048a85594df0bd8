"""The step that `et.prepare` gives, among everything that people do between two steps."""

from __future__ import annotations

import copy
import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError
from edgetrain.run.options import MAX_SHAPES
from tests.helpers.marks import needs_arena
from tests.helpers.plain import Loss, OptimizerMaker, Training, differing, relative_error, sgd, training

ROUNDING = 1e-12


class Net(nn.Module):
    """Convolution, batch norm, dropout, a linear head, and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        out: Tensor = self.head(self.drop(x.mean((2, 3)))) * self.scale
        return out


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(n: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def net() -> Net:
    torch.manual_seed(1)
    return Net().double()


class Pair:
    """The same training twice: once through `et.prepare`, once in plain PyTorch."""

    def __init__(
        self, model: nn.Module | None = None, loss: Loss = cross_entropy, optimizer: OptimizerMaker = sgd
    ) -> None:
        self.ours = training(model if model is not None else net(), loss, optimizer)
        self.theirs = self.ours.twin()
        self.step = et.prepare(self.ours.model, loss, self.ours.optimizer, batch(), memory_format="preserve")
        self._seed = 0

    @property
    def sides(self) -> tuple[Training, Training]:
        return self.ours, self.theirs

    def same(self, items: tuple[Any, ...] | None = None, *, tolerance: float = 0.0) -> Tensor:
        """One step on both sides leaves the same behind: parameters, buffers, optimizer state, random state."""
        items = items if items is not None else batch(seed=self._seed)
        self._seed += 1
        torch.manual_seed(self._seed)
        right = self.theirs.plain_step(*items)
        after = self.theirs.snapshot()
        torch.manual_seed(self._seed)
        found = self.step(*items)
        if tolerance:
            assert relative_error(self.ours.snapshot(), after) < tolerance
        else:
            assert torch.equal(found, right)
            assert differing(self.ours.snapshot(), after) == []
        return found


# ---- what a call gives and leaves ---------------------------------------------------------------------------------


def test_the_loss_is_detached_and_no_gradient_stays() -> None:
    pair = Pair()
    pair.ours.model.get_parameter("head.weight").grad = torch.ones(3, 4, dtype=torch.float64)
    loss = pair.step(*batch())
    assert loss.shape == ()
    assert not loss.requires_grad
    assert all(p.grad is None for p in pair.ours.model.parameters())


@pytest.mark.parametrize("kind", [sgd, adam])
def test_gradients_are_those_of_autograd_and_change_nothing(kind: OptimizerMaker) -> None:
    pair = Pair(optimizer=kind)
    for trained in range(2):  # before there is optimizer state, and after
        before = pair.ours.snapshot()
        torch.set_rng_state(before["random"])
        found = pair.step.gradients(*batch())
        assert differing(pair.ours.snapshot(), before) == []
        assert len(pair.ours.optimizer.state) == trained * 6
        torch.set_rng_state(before["random"])
        twin = pair.ours.twin()
        cross_entropy(twin.model, *batch()).backward()
        right = {name: p.grad for name, p in twin.model.named_parameters() if p.grad is not None}
        assert found.keys() == right.keys() == {name for name, _ in pair.ours.model.named_parameters()}
        assert differing(found, right) == []
        pair.step(*batch())


# ---- what may change between two steps ----------------------------------------------------------------------------


def test_count_counts_the_steps_that_happened() -> None:
    ours = training(net(), cross_entropy)
    step = et.prepare(ours.model, ours.loss, ours.optimizer, batch())
    assert step.count == 0
    step(*batch())
    step.gradients(*batch())
    step.trace_memory(*batch())
    step.evaluate(*batch())
    assert step.count == 1
    step(*batch(3))  # another shape
    step.timed(lambda _: None, *batch())
    assert step.count == 3
    with pytest.raises(UserError):
        step("no batch")
    assert step.count == 3


@needs_arena
def test_a_step_leaves_nothing_to_the_garbage_collector() -> None:
    """What one step still held would lie in the arena where the next one wants to be."""
    ours = training(net(), cross_entropy)
    step = et.prepare(ours.model, ours.loss, ours.optimizer, batch())
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            step(*batch())
        assert step.used.arena is not None
        assert step.used.arena.improvised == 0
    finally:
        gc.enable()


def test_another_batch_size_just_works() -> None:
    pair = Pair()
    for n in (4, 7, 4, 2, 7):
        pair.same(batch(n, seed=n))


def test_more_shapes_than_are_kept() -> None:
    pair = Pair()
    sizes = range(2, 2 + MAX_SHAPES + 3)
    for n in (*sizes, *sizes[:2]):  # the first ones were dropped meanwhile
        pair.same(batch(n))
    assert len(pair.step._variants) == MAX_SHAPES


def test_a_shape_seen_before_is_not_captured_again() -> None:
    pair = Pair()
    first = pair.step.compiled(*batch(4))
    assert pair.step.compiled(*batch(5)) is not first
    assert pair.step.compiled(*batch(4)) is first


def test_eval_mode_is_seen() -> None:
    pair = Pair()
    pair.same()
    for change in (nn.Module.eval, nn.Module.train):
        for side in pair.sides:
            change(side.model)
        pair.same()


def test_one_module_in_eval_mode_is_seen() -> None:
    pair = Pair()
    for side in pair.sides:
        side.model.get_submodule("norm").eval()
    before = pair.ours.model.get_buffer("norm.running_mean").clone()
    pair.same()
    assert torch.equal(pair.ours.model.get_buffer("norm.running_mean"), before)


def test_a_changed_attribute_is_seen() -> None:
    pair = Pair()
    pair.same()
    for side in pair.sides:
        side.model.scale = 2.0  # type: ignore[assignment]
    pair.same()


def test_a_changed_variable_of_the_loss_is_seen() -> None:
    weight = 1.0

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return weight * F.cross_entropy(model(x), y)

    pair = Pair(loss=loss)
    first = pair.same(batch())
    weight = 3.0
    assert pair.same(batch()) > 1.5 * first


def test_a_changed_list_in_the_loss_is_seen() -> None:
    weights = [1.0]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return sum(weights) * F.cross_entropy(model(x), y)

    pair = Pair(loss=loss)
    pair.same()
    weights.append(0.5)
    pair.same()


def test_a_number_in_the_batch_is_seen() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        return weight * F.cross_entropy(model(x), y)

    pair = Pair(loss=loss)
    pair.same((*batch(), 2.0))
    pair.same((*batch(), 3.0))


def test_momentum_switched_on_and_off_is_seen() -> None:
    pair = Pair(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    pair.same()
    for momentum in (0.9, 0.5, 0.0, 0.9):
        for side in pair.sides:
            side.optimizer.param_groups[0]["momentum"] = momentum
        pair.same()


def test_a_frozen_parameter_is_seen() -> None:
    pair = Pair()
    pair.same()
    before = pair.ours.model.get_parameter("conv.weight").clone()
    for side in pair.sides:
        side.model.get_parameter("conv.weight").requires_grad_(False)
    pair.same()
    assert torch.equal(pair.ours.model.get_parameter("conv.weight"), before)
    for side in pair.sides:
        side.model.get_parameter("conv.weight").requires_grad_(True)
    pair.same()


def test_a_new_parameter_group_is_seen() -> None:
    model = net()
    pair = Pair(model, optimizer=lambda _: torch.optim.SGD(model.conv.parameters(), lr=0.1))
    pair.same()
    for side in pair.sides:
        side.optimizer.add_param_group({"params": list(side.model.get_submodule("head").parameters()), "lr": 0.01})
        side.model.zero_grad()  # plain PyTorch gathered gradients of the head all the while
    before = pair.ours.model.get_parameter("head.weight").clone()
    pair.same()
    assert not torch.equal(pair.ours.model.get_parameter("head.weight"), before)


def test_a_replaced_module_is_seen() -> None:
    pair = Pair(optimizer=lambda ps: torch.optim.SGD(list(ps)[:4], lr=0.1))  # the head is not trained
    pair.same()
    torch.manual_seed(9)
    head = nn.Linear(4, 3).double()
    for side in pair.sides:
        side.model.head = copy.deepcopy(head)
    pair.same()


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    ],
    ids=["StepLR", "OneCycleLR", "CosineAnnealingLR"],
)
def test_a_scheduler_works_and_warns_of_nothing(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    pair = Pair()
    schedulers = [make(side.optimizer) for side in pair.sides]
    rates = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            pair.same()
            for scheduler in schedulers:
                scheduler.step()
            rates.add(pair.ours.optimizer.param_groups[0]["lr"])
    assert len(rates) == 4


@pytest.mark.parametrize("kind", [sgd, adam])
def test_loaded_state_is_seen(kind: OptimizerMaker) -> None:
    tolerance = 0.0 if kind is sgd else ROUNDING
    pair = Pair(optimizer=kind)
    saved = copy.deepcopy([(s.model.state_dict(), s.optimizer.state_dict()) for s in pair.sides])
    pair.same(tolerance=tolerance)
    middle = copy.deepcopy([s.optimizer.state_dict() for s in pair.sides])
    pair.same(tolerance=tolerance)
    for side, (model, _) in zip(pair.sides, saved, strict=True):
        side.model.load_state_dict(model)
    pair.same(tolerance=tolerance)
    for side, optimizer in zip(pair.sides, middle, strict=True):
        side.optimizer.load_state_dict(optimizer)
    pair.same(tolerance=tolerance)
    for side, (model, optimizer) in zip(pair.sides, saved, strict=True):  # back to where there was no state yet
        side.model.load_state_dict(model)
        side.optimizer.load_state_dict(optimizer)
    assert len(pair.ours.optimizer.state) == 0
    pair.same(tolerance=tolerance)


def test_state_loaded_with_assign_is_seen() -> None:
    """The tensors of the model are then other objects than those of the optimizer, in plain PyTorch too."""
    pair = Pair(optimizer=lambda ps: torch.optim.SGD(list(ps)[:4], lr=0.1))
    pair.same()
    for side in pair.sides:
        mine = side.model.state_dict(keep_vars=True)
        other = {n: t.detach() * 0.5 if n.startswith("head") else t for n, t in mine.items()}
        side.model.load_state_dict(other, assign=True)
    pair.same()


@pytest.mark.parametrize("kind", [sgd, adam])
def test_one_can_go_on_in_plain_pytorch_and_come_back(kind: OptimizerMaker) -> None:
    pair = Pair(optimizer=kind)
    tolerance = 0.0 if kind is sgd else ROUNDING
    pair.same(tolerance=tolerance)
    for side in pair.sides:
        torch.manual_seed(5)
        side.plain_step(*batch(seed=5))
    pair.same(tolerance=tolerance)


def test_parameters_changed_in_place_are_seen() -> None:
    pair = Pair()
    pair.same()
    with torch.no_grad():
        for side in pair.sides:
            side.model.get_parameter("head.bias").add_(1.0)
    pair.same()


# ---- tensors that only the loss knows -----------------------------------------------------------------------------


def test_a_target_network_is_read_live() -> None:
    target = net().eval()

    def loss(model: nn.Module, x: Tensor, _y: Tensor) -> Tensor:
        with torch.no_grad():
            goal = target(x)
        return F.mse_loss(model(x), goal)

    pair = Pair(loss=loss)
    pair.same()
    with torch.no_grad():
        for p, q in zip(target.parameters(), pair.ours.model.parameters(), strict=True):
            p.lerp_(q, 0.5)
    pair.same()
    before = copy.deepcopy(target.state_dict())
    target.load_state_dict(pair.ours.model.state_dict())
    pair.same()
    assert differing(before, target.state_dict()) != []


def test_a_replaced_tensor_of_the_loss_is_seen() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, weight=weight)

    pair = Pair(loss=loss)
    pair.same()
    weight = torch.tensor([3.0, 1.0, 1.0], dtype=torch.float64)
    pair.same()


def test_a_gan_trains_two_nets_that_each_leave_the_other_alone() -> None:
    def make() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(4)
        maker = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5)).double()
        judge = nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)).double()
        return (
            maker, judge,
            torch.optim.Adam(maker.parameters(), betas=(0.5, 0.99)), torch.optim.SGD(judge.parameters(), lr=0.1),
        )  # fmt: skip

    def losses(maker: nn.Module, judge: nn.Module) -> tuple[Loss, Loss]:
        def of_judge(model: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
            fake = maker(noise).detach()
            return F.softplus(-model(real)).mean() + F.softplus(model(fake)).mean()

        def of_maker(model: nn.Module, noise: Tensor) -> Tensor:
            return F.softplus(-judge(model(noise))).mean()

        return of_judge, of_maker

    real, noise = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    maker, judge, of_maker, of_judge = make()
    judge_loss, maker_loss = losses(maker, judge)
    judge_step = et.prepare(judge, judge_loss, of_judge, (real, noise))
    maker_step = et.prepare(maker, maker_loss, of_maker, (noise,))
    twin_maker, twin_judge, twin_of_maker, twin_of_judge = make()
    twin_judge_loss, twin_maker_loss = losses(twin_maker, twin_judge)
    for _ in range(3):
        before = copy.deepcopy(maker.state_dict())
        judge_step(real, noise)
        assert differing(before, maker.state_dict()) == []
        before = copy.deepcopy(judge.state_dict())
        maker_step(noise)
        assert differing(before, judge.state_dict()) == []
        for model, loss, optimizer, items in (
            (twin_judge, twin_judge_loss, twin_of_judge, (real, noise)),
            (twin_maker, twin_maker_loss, twin_of_maker, (noise,)),
        ):
            twin_of_judge.zero_grad()
            twin_of_maker.zero_grad()
            loss(model, *items).backward()
            optimizer.step()
    assert relative_error(maker.state_dict(), twin_maker.state_dict()) < ROUNDING
    assert relative_error(judge.state_dict(), twin_judge.state_dict()) < ROUNDING


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "said"),
    [({"memory": "much"}, "amount of memory"), ({"process_memory": -1}, "amount of memory"),
     ({"planner": "nonsense"}, "no planner 'nonsense'")],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused(wish: dict[str, Any], said: str) -> None:
    ours = training(net(), cross_entropy)
    with pytest.raises(UserError, match=said):
        et.prepare(ours.model, ours.loss, ours.optimizer, batch(), **wish)


def test_a_process_that_takes_more_already_is_an_answer_with_what_would_work() -> None:
    ours = training(net(), cross_entropy)
    with pytest.raises(et.Infeasible, match="itself takes more than that") as caught:
        et.prepare(ours.model, ours.loss, ours.optimizer, batch(), process_memory=10**6)
    assert caught.value.smallest_bytes > caught.value.bound_bytes > 10**8  # PyTorch is loaded here


def test_a_compiled_step_refuses_another_shape() -> None:
    pair = Pair()
    before = pair.ours.snapshot()
    with pytest.raises(UserError, match="item 0 of the batch") as caught:
        pair.step.compiled(*batch(4))(*batch(5))
    assert caught.value.next_step is not None
    assert differing(pair.ours.snapshot(), before) == []


@pytest.mark.parametrize("n", [1, 3, 15, 16, 17])
def test_images_stay_channels_last_at_every_batch_size(n: int) -> None:
    """From 16 on PyTorch may choose another kernel, which knows contiguous results only."""
    x, y = batch(n)
    items = (x.float(), y)
    ours = training(net().float(), cross_entropy)
    step = et.prepare(ours.model, ours.loss, ours.optimizer, items, memory_format="channels_last")
    assert step(*items).isfinite()
    convolved = next(op for op in step.graph.ops if op.kind == "aten.convolution.default").creates[0]
    assert step.graph.tensors[convolved].stride == (4 * 16, 1, 4 * 4, 4)


# ---- plans and the stages by hand ---------------------------------------------------------------------------------


def test_the_plan_says_what_its_numbers_are() -> None:
    def plan(model: nn.Module, optimizer: OptimizerMaker, memory_format: Any, dtype: torch.dtype) -> et.Plan:
        x, y = batch()
        ours = training(model.to(dtype), cross_entropy, optimizer)
        items = (x.to(dtype), y)
        return et.prepare(ours.model, ours.loss, ours.optimizer, items, memory_format=memory_format).plan

    assert plan(net(), sgd, "preserve", torch.float64).exact == "bitwise"
    assert plan(net(), sgd, "preserve", torch.float32).exact == "bitwise"
    assert plan(net(), adam, "preserve", torch.float64).exact == "bitwise"
    assert plan(net(), sgd, "channels_last", torch.float32).exact == "rounding"
    assert plan(net(), sgd, "auto", torch.float32).exact == "rounding"  # our batch norm, channels-last
    plainer = nn.Sequential(
        nn.Conv2d(batch()[0].shape[1], 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    assert plan(plainer, sgd, "auto", torch.float32).exact == "rounding"
    assert plan(net(), sgd, "auto", torch.float64).exact == "bitwise"  # oneDNN has no such convolution
    found = plan(net(), sgd, "preserve", torch.float64)
    inputs = sum(t.nbytes for t in batch())
    assert found.peak_bytes > found.persistent_bytes > inputs


def test_a_plan_is_the_same_after_a_file(tmp_path: Path) -> None:
    plan = Pair().step.plan
    plan.save(tmp_path / "plan.json")
    assert et.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: "",
        lambda data: "[]",
        lambda data: json.dumps({**json.loads(data), "edgetrain plan": 99}),
        lambda data: json.dumps({**json.loads(data), "peak_bytes": "many"}),
        lambda data: json.dumps({**json.loads(data), "updates": "never"}),
        lambda data: json.dumps({**json.loads(data), "schedule": [[0.5]]}),
        lambda data: json.dumps({**json.loads(data), "schedule": [7]}),
        lambda data: json.dumps({**json.loads(data), "schedule": [[-1]]}),
        lambda data: json.dumps({k: v for k, v in json.loads(data).items() if k != "planner"}),
    ],
    ids=["cut", "empty", "list", "schema", "bytes", "updates", "fraction", "number", "free nothing", "missing"],
)
def test_a_corrupt_plan_file_is_refused(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    path = tmp_path / "plan.json"
    Pair().step.plan.save(path)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(UserError, match=r"plan\.json is not a plan file"):
        et.Plan.load(path)


def test_a_plan_file_of_bytes_that_are_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="not a plan file"):
        et.Plan.load(tmp_path / "plan.json")
    with pytest.raises(UserError, match="there is no plan file"):
        et.Plan.load(tmp_path / "none.json")


def test_a_plan_is_refused_for_another_graph() -> None:
    ours = training(net(), cross_entropy)
    graphs = [et.capture(ours.model, ours.loss, ours.optimizer, batch(n)) for n in (4, 5)]
    with pytest.raises(UserError, match="made for another graph"):
        et.compile(graphs[0], et.keep_all(graphs[1]), ours.model, ours.optimizer)


@pytest.mark.parametrize("updates", ["early", "guarded", "together", None])
def test_the_stages_by_hand_are_what_prepare_does(updates: Any) -> None:
    pair = Pair()
    hand = pair.ours.twin()
    graph = et.capture(hand.model, hand.loss, hand.optimizer, batch())
    plan = et.keep_all(graph, updates=updates)
    if updates is None:
        assert (graph, plan) == (pair.step.graph, pair.step.plan)
    else:
        assert plan.updates == updates
    step = et.compile(graph, plan, hand.model, hand.optimizer)
    for seed in range(3):
        found = pair.same(batch(seed=seed))
        torch.manual_seed(seed + 1)  # as `same` did
        assert torch.equal(step(*batch(seed=seed)), found)
        assert differing(hand.snapshot(), pair.ours.snapshot()) == []
    assert "def step(" in step.source


def test_a_graph_from_a_file_needs_the_tensors_of_the_loss(tmp_path: Path) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, weight=weight)

    ours = training(net(), loss)
    twin = ours.twin()
    et.capture(ours.model, loss, ours.optimizer, batch()).save(tmp_path / "graph.json")
    graph = et.Graph.load(tmp_path / "graph.json")
    (name,) = [source.path for source in graph.sources.values() if source.sort == "external"]
    with pytest.raises(UserError, match="weight") as caught:
        et.compile(graph, et.keep_all(graph), ours.model, ours.optimizer)
    assert name in str(caught.value)
    step = et.compile(graph, et.keep_all(graph), ours.model, ours.optimizer, externals={name: weight})
    torch.manual_seed(0)
    right = twin.plain_step(*batch())
    torch.manual_seed(0)
    assert torch.equal(step(*batch()), right)
    assert differing(ours.snapshot(), twin.snapshot()) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"memory_format": "nhwc"}, "memory_format"),
        ({"unused": "banana"}, "unused"),
        ({"plan_time_s": -1}, "plan_time_s"),
        ({"clip_norm": "1"}, "clip_norm"),
        ({"planner": "chen"}, "needs a budget"),
        ({"planner": "best"}, "no planner"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], told: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=told):
        et.prepare(model, lambda m, x: m(x).sum(), optimizer, (torch.randn(3, 4),), **options)
