"""The graph as data: what a captured step says about itself, and that a file of it is read back equal or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from edgetrain.errors import UserError
from edgetrain.graph.capture.training import capture, capture_inference
from edgetrain.graph.ir import BITS, INTEGERS, SCHEMA, Graph, Op, Quantization, Ref, bytes_of, from_json, to_json
from edgetrain.graph.ir import Tensor as Data
from edgetrain.graph.show import show, summary


def mean_square(model: nn.Module, *batch: Tensor) -> Tensor:
    output: Tensor = model(*batch)
    return output.square().mean()


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 2, 3), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip


IMAGE = (2, 3, 6, 6)


class OwnConstant(nn.Module):
    """Makes a constant in forward; the graph has to carry its value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * torch.tensor([1.5, -2.0, 3.25])


class Masked(nn.Module):
    """Minus infinity, infinity and NaN among the arguments of ops. None of them is a number in JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        filled = y.masked_fill(torch.eye(3, dtype=torch.bool)[0], -math.inf).softmax(-1)
        return filled.clamp(max=math.inf).masked_fill(torch.zeros(3, dtype=torch.bool), math.nan)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv net": (conv_net, IMAGE),
    "own constant": (OwnConstant, (4, 3)),
    "infinities": (Masked, (4, 3)),
}


@cache
def captured(name: str) -> Graph:
    build, shape = NETS[name]
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    return capture(model, mean_square, optimizer, (torch.zeros(shape),), use_cache=False)


def ops_of(graph: Graph, word: str) -> list[Op]:
    return [op for op in graph.ops if word in op.kind]


# ---- to a file and back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_graph_is_read_back_equal(name: str, tmp_path: Path) -> None:
    graph = captured(name)
    graph.save(tmp_path / "graph.json")
    loaded = Graph.load(tmp_path / "graph.json")
    assert loaded == graph
    assert loaded.key == graph.key
    assert from_json(to_json(graph)) == graph
    text = json.dumps(to_json(graph))
    assert json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON")) == json.loads(text)


def test_values_that_json_lacks_are_read_back() -> None:
    """Infinities and NaN among the arguments; constants to the last bit."""
    arguments = [value for op in from_json(to_json(captured("infinities"))).ops for value in op.args]
    numbers = [value for value in arguments if isinstance(value, float)]
    assert -math.inf in numbers
    assert math.inf in numbers
    assert any(math.isnan(value) for value in numbers)
    (value,) = from_json(to_json(captured("own constant"))).constants.values()
    assert torch.frombuffer(bytearray(value), dtype=torch.float32).tolist() == [1.5, -2.0, 3.25]


def test_key_follows_the_content() -> None:
    """Any change gives another key; another capture of the same step gives the same."""
    graph = captured("conv net")
    changed = [
        replace(graph, about={**graph.about, "model": "Other"}),
        replace(graph, unused=("x",)),
        replace(graph, outputs=(0,)),
        replace(graph, ops=(replace(graph.ops[0], module="other"), *graph.ops[1:])),
        replace(graph, ops=(replace(graph.ops[0], random=True), *graph.ops[1:])),
        replace(graph, tensors=(replace(graph.tensors[0], offset=1), *graph.tensors[1:])),
        replace(graph, storages=(replace(graph.storages[0], n_bytes=1), *graph.storages[1:])),
        captured("own constant"),
        replace(captured("own constant"), constants=dict.fromkeys(captured("own constant").constants, b"\0" * 12)),
    ]
    assert len({graph.key, *(other.key for other in changed)}) == 1 + len(changed)
    model = conv_net()
    again = capture(model, mean_square, torch.optim.Adam(model.parameters()), (torch.ones(IMAGE),), use_cache=False)
    assert (again, again.key) == (graph, graph.key)


@st.composite
def tensors_of_integers(draw: st.DrawFn) -> Data:
    """Any tensor of packed bits, or of integers with or without scales; not all of them are legal."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    dtype = draw(st.sampled_from([BITS, *INTEGERS]))
    stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    axis = draw(st.none() | st.integers(0, len(shape)))
    count = shape[axis] if axis is not None and axis < len(shape) else 1
    scales = draw(st.lists(st.floats(1e-30, 1e30), min_size=count, max_size=count))
    zeros = draw(st.lists(st.integers(-(2**31), 2**31), min_size=count, max_size=count))
    units = draw(st.none() | st.just(Quantization(tuple(scales), tuple(zeros), axis)))
    return Data("t", 0, shape, stride, dtype, draw(st.integers(0, 20)), units)


@given(tensors_of_integers())
def test_tensors_of_integers_are_read_back_equal(tensor: Data) -> None:
    """Scales to the last bit; and another tensor gives another key."""
    plain = captured("conv net")
    graph = replace(plain, tensors=(tensor, *plain.tensors[1:]))
    again = from_json(json.loads(json.dumps(to_json(graph))))
    assert again == graph
    assert again.key == graph.key != plain.key


@given(tensors_of_integers())
def test_bytes_are_those_that_numpy_packs(tensor: Data) -> None:
    """Of packed bits an eighth, rounded up; what PyTorch holds in their place has as many."""
    numbers = np.zeros(tensor.n_elements, "bool" if tensor.dtype == BITS else tensor.dtype)
    packed = np.packbits(numbers) if tensor.dtype == BITS else numbers
    assert tensor.n_bytes == bytes_of(tensor.n_elements, tensor.dtype) == packed.nbytes == tensor.carrier.n_bytes
    whole = replace(tensor, offset=tensor.offset // 8 * 8)
    if tensor.n_elements:
        assert whole.end_bytes == bytes_of(whole.offset, tensor.dtype) + tensor.n_bytes == whole.carrier.end_bytes
    else:
        assert whole.end_bytes == 0
    assert (tensor.carrier is tensor) == (tensor.dtype != BITS)


def test_loading_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no graph file .*nothing\.json"):
        Graph.load(tmp_path / "nothing.json")


def _edit(data: dict[str, Any], *path: Any, to: Any) -> None:
    for step in path[:-1]:
        data = data[step]
    data[path[-1]] = to


EDITS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "older schema": (("edgetrain graph",), 1),
    "newer schema": (("edgetrain graph",), 3),
    "no schema": (("edgetrain graph",), None),
    "op of another library": (("ops", 0, 1), "os.system.default"),
    "op with a path": (("ops", 0, 1), "aten.__class__.default()"),
    "op that is no word": (("ops", 0, 1), 7),
    "storage of a fraction": (("storages", 0, 0), 1.5),
    "storage of a word": (("storages", 0, 0), "12"),
    "storage of yes": (("storages", 0, 0), True),
    "shape with a fraction": (("tensors", 0, 2), [1.0, 2]),
    "tensor without scales, or a gap for them": (("tensors", 0), ["x", 0, [2], [1], "int8", 0]),
    "scales that are one number": (("tensors", 0, 6), [0.5, [0], None]),
    "scale of a word": (("tensors", 0, 6), [["0.5"], [0], None]),
    "scale of yes": (("tensors", 0, 6), [[True], [0], None]),
    "zero point of a fraction": (("tensors", 0, 6), [[0.5], [0.5], None]),
    "axis of a word": (("tensors", 0, 6), [[0.5], [0], "0"]),
    "scales without an axis or a gap for it": (("tensors", 0, 6), [[0.5], [0]]),
    "tensor of a word": (("ops", 0, 4), ["x"]),
    "ref of a word": (("ops", 0, 2), [{"t": "0"}]),
    "unknown argument": (("ops", 0, 2), [{"eval": "1"}]),
    "two arguments in one": (("ops", 0, 2), [{"t": 0, "dtype": "float32"}]),
    "atom with a path": (("ops", 0, 2), [{"dtype": "float32.__class__"}]),
    "float of a list": (("ops", 0, 2), [{"float": []}]),
    "op of eight parts": (("ops", 0), [1, 2, 3, 4, 5, 6, 7, 8]),
    "ops no list": (("ops",), 5),
    "gradient of a word": (("gradients",), {"x": 1}),
    "source of one part": (("sources",), {"0": ["input"]}),
    "source of an unknown sort": (("sources", "0"), ["moon", "0"]),
    "source of a list": (("sources", "0"), [["input"], "0"]),
    "input at no position": (("sources", "0"), ["input", "first"]),
    "constants no base64": (("constants",), {"0": "?"}),
    "constants no text": (("constants",), {"0": 3}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_changed_file_is_refused(edit: str, tmp_path: Path) -> None:
    """A UserError that names the file and says how to make it anew; never an error of another kind."""
    path, value = EDITS[edit]
    data = json.loads(json.dumps(to_json(captured("conv net"))))
    assert data["sources"]["0"] == ["input", "0"]
    _edit(data, *path, to=value)
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"graph\.json is not a graph file of edgetrain") as caught:
        Graph.load(file)
    assert "edgetrain graph MODEL" in (caught.value.next_step or "")


def test_older_file_is_refused_by_its_schema(tmp_path: Path) -> None:
    """The message says what the file has, what is read, and how to make the file anew."""
    file = tmp_path / "graph.json"
    file.write_text(json.dumps({**to_json(captured("conv net")), "edgetrain graph": 1}))
    with pytest.raises(UserError, match="graph MODEL") as caught:
        Graph.load(file)
    assert caught.value.received == f"the file has schema 1, and this version of edgetrain reads schema {SCHEMA}"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'"graph"', b"{}", b'{"edgetrain graph": 1}', b"[" * 100_000],
)
def test_corrupt_file_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match="is not a graph file of edgetrain"):
        Graph.load(file)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    captured("conv net").save(file)
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match="is not a graph file of edgetrain"):
        Graph.load(file)


def test_legal_but_changed_file_is_refused(tmp_path: Path) -> None:
    """Another number in a saved file is a legal graph of another step; its key tells."""
    file = tmp_path / "graph.json"
    captured("conv net").save(file)
    text = file.read_text()
    assert "0.0, 6.0" in text
    file.write_text(text.replace("0.0, 6.0", "0.0, 5.0"))
    with pytest.raises(UserError, match="is not a graph file of edgetrain") as caught:
        Graph.load(file)
    assert captured("conv net").key in (caught.value.received or "")


def test_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="graph file"):
        Graph.load(tmp_path)


def test_illegal_graph_is_not_loaded(tmp_path: Path) -> None:
    """Well-formed, but its first op is gone: what it made is read by others."""
    data = to_json(captured("conv net"))
    data["ops"] = data["ops"][1:]
    (tmp_path / "graph.json").write_text(json.dumps({**data, "key": from_json(data).key}))
    with pytest.raises(UserError, match="which no op before it creates"):
        Graph.load(tmp_path / "graph.json")


# ---- what a graph says ----------------------------------------------------------------------------------------


def test_random_ops_and_changed_buffers_are_marked() -> None:
    graph = captured("conv net")
    assert [(op.kind, op.module, op.phase) for op in graph.ops if op.random] == [("aten.bernoulli.p", "4", "forward")]
    (norm,) = ops_of(graph, "native_batch_norm.default")
    written = {t.name for t in graph.tensors if t.storage in norm.writes}
    assert written == {"1.running_mean", "1.running_var"}
    counters = {t.name for op in graph.ops if op.phase == "forward" for t in graph.tensors if t.storage in op.writes}
    assert counters == {*written, "1.num_batches_tracked"}
    assert not any(op.random for op in captured("own constant").ops)


def test_phases_stand_in_order() -> None:
    phases = [op.phase for op in captured("conv net").ops]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    assert set(phases) == {"forward", "backward", "update"}


def test_ops_carry_the_name_of_the_module() -> None:
    """The layer whose forward made them; the backward ops too."""
    graph = captured("conv net")
    for word, modules in {
        "aten.convolution.": ["0", "3"],
        "convolution_backward": ["3", "3", "0"],
        "native_batch_norm.": ["1"],
        "native_batch_norm_backward": ["1"],
        "hardtanh.": ["2"],
        "hardtanh_backward": ["2"],
        "addmm": ["6"],
    }.items():
        assert [op.module for op in ops_of(graph, word)] == modules, word
    assert {op.module for op in graph.ops if op.phase == "update"} == {"0", "1", "3", "6"}
    backward = {op.module for op in graph.ops if op.phase == "backward"}
    assert backward >= {"0", "1", "2", "3", "4", "5", "6"}


def test_bytes_by_role_are_those_of_the_model() -> None:
    model = conv_net()
    totals = captured("conv net").bytes_by_role()
    parameters = sum(p.numel() * 4 for p in model.parameters())
    assert totals["parameter"] == parameters
    assert totals["buffer"] == sum(b.numel() * b.element_size() for b in model.buffers())
    assert totals["state"] == 2 * parameters + 4 * len(list(model.parameters()))
    assert totals["input"] == 4 * math.prod(IMAGE)
    assert totals["constant"] == 0
    assert totals["gradient"] >= parameters
    assert captured("own constant").bytes_by_role()["constant"] == 12


def test_convolution_backward_is_two_ops() -> None:
    """Weight and bias first, then the input; the first layer's input needs no gradient."""
    masks = [op.args[-1] for op in ops_of(captured("conv net"), "convolution_backward")]
    assert masks == [(False, True, True), (True, False, False), (False, True, True)]


def test_backward_of_relu6_reads_the_result() -> None:
    """Its input is then dead after the forward pass."""
    graph = captured("conv net")
    (forward,), (backward,) = ops_of(graph, "hardtanh.default"), ops_of(graph, "hardtanh_backward")
    (result,) = forward.creates
    assert backward.args[1] == Ref(result)
    assert forward.reads[0] not in backward.reads


def test_gradients_are_those_of_the_parameters() -> None:
    graph = captured("conv net")
    model = conv_net()
    assert {graph.tensors[p].name for p in graph.gradients} == {name for name, _ in model.named_parameters()}
    assert all(graph.role(p) == "parameter" and graph.role(g) == "gradient" for p, g in graph.gradients.items())
    assert graph.tensors[graph.loss].shape == ()
    assert [graph.tensors[t].name for t in graph.inputs] == ["input.0"]


def test_show_tells_phases_sizes_and_random_ops() -> None:
    graph = captured("conv net")
    text = show(graph)
    lines = text.splitlines()
    assert lines[0] == f"training step of Sequential, Adam; input.0 float32[2,3,6,6]; graph {graph.key}"
    assert [line for line in lines if line in ("forward", "backward", "update")] == ["forward", "backward", "update"]
    norm = next(line for line in lines if "aten.native_batch_norm " in line)
    assert "writes 1.running_mean, 1.running_var" in norm
    (random,) = (op for op in graph.ops if op.random)
    assert next(line for line in lines if line.split()[:1] == [random.name]).endswith("random")
    assert f"random: 1 ops, {random.name}" in lines
    conv = next(line for line in lines if line.split()[:1] == ["convolution_1"])
    assert "input.0, 0.weight, 0.bias → float32[2,4,4,4]  0.00 MB" in conv
    assert sum("MB  parameter" in line for line in lines) == 1
    assert not any("aten.view" in line for line in lines)
    assert any("aten.view" in line for line in show(graph, views=True).splitlines())


@pytest.mark.parametrize(
    ("units", "text"),
    [
        (Quantization((0.02,), (-3,)), "int8[2,3,6,6] (scale 0.02, zero point -3)"),
        (Quantization((0.5, 0.25, 2.0), (0, 1, 2), 1), "int8[2,3,6,6] (3 scales along axis 1)"),
    ],
)
def test_show_tells_what_a_unit_is_worth(units: Quantization, text: str) -> None:
    graph = captured("conv net")
    first = replace(graph.tensors[0], dtype="int8", quantization=units)
    assert f"; input.0 {text}; graph " in show(replace(graph, tensors=(first, *graph.tensors[1:])))


def test_summary_counts_every_op_once() -> None:
    graph = replace(captured("conv net"), unused=("head.weight",))
    lines = summary(graph)
    views = sum(op.view for op in graph.ops)
    assert lines[0].startswith(f"{len(graph.ops) - views} ops (")
    assert lines[0].endswith(f" and {views} views")
    assert "not reached by the loss, left as they are: head.weight" in lines


# ---- prediction -----------------------------------------------------------------------------------------------


def test_prediction_has_neither_randomness_nor_update() -> None:
    """Eval mode whatever the flags are, which are put back one by one."""
    model = conv_net()
    model[1].eval()
    graph = capture_inference(model, (torch.zeros(IMAGE),), use_cache=False)
    assert [m.training for m in model.modules()] == [True, True, False, True, True, True, True, True]
    assert {op.phase for op in graph.ops} == {"forward"}
    assert not any(op.random or op.writes for op in graph.ops)
    assert not graph.gradients
    assert not graph.bytes_by_role()["state"]
    assert graph.tensors[graph.outputs[0]].shape == (2, 5)
    assert show(graph).startswith("prediction of Sequential; input.0 float32[2,3,6,6]")


def test_failed_prediction_puts_the_flags_back() -> None:
    model = conv_net()
    with pytest.raises(UserError, match="module 0 cannot be run on the example"):
        capture_inference(model, (torch.zeros(2, 9, 6, 6),), use_cache=False)
    assert all(m.training for m in model.modules())
