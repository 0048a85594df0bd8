"""A graph file may come from anywhere: no text of it becomes code, and nothing but torch's own kernels is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import edgetrain as et
from edgetrain.errors import EdgetrainError, UserError
from edgetrain.graph.ir import from_json, to_json


@pytest.fixture
def data() -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return json.loads(json.dumps(to_json(et.capture(model, lambda m, x: m(x).sum(), optimizer, (torch.ones(1, 2),)))))


def load(path: Path, data: Any) -> et.Graph:
    """Saved as the owner of the file would: with the key of its content, where it has one."""
    try:
        data = {**data, "key": from_json(data).key}
    except (ValueError, KeyError, TypeError):
        data = {**data, "key": ""}
    path.write_text(json.dumps(data))
    return et.Graph.load(path)


@pytest.mark.parametrize("name", ["a\n    f0.PWNED=1", "a b", "", "1a", "#"])
def test_a_name_of_an_op_is_a_name(tmp_path: Path, data: Any, name: str) -> None:
    data["ops"][0][0] = name
    with pytest.raises(UserError):
        load(tmp_path / "graph.json", data)


def test_a_keyword_is_a_name(tmp_path: Path, data: Any) -> None:
    data["ops"][0][3] = {"**f0.__setattr__('PWNED', 1) or {}, dtype": 1}
    with pytest.raises(UserError):
        load(tmp_path / "graph.json", data)


@pytest.mark.parametrize("group", ["0]; f0.PWNED=1 #", -0.5, None, True])
def test_a_group_is_a_number(tmp_path: Path, data: Any, group: object) -> None:
    update = next(op for op in data["ops"] if op[5] == "update")
    update[3]["group"] = group
    with pytest.raises(UserError):
        load(tmp_path / "graph.json", data)


@pytest.mark.parametrize("kind", ["aten.__class__.mro", "aten.relu.__call__", "os.system.default", "aten.relu.nothing"])
def test_only_kernels_are_called(tmp_path: Path, data: Any, kind: str) -> None:
    next(op for op in data["ops"] if op[1] == "aten.relu.default")[1] = kind
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def load_and_compile() -> None:
        graph = load(tmp_path / "graph.json", data)
        et.compile(graph, et.keep_all(graph), model, optimizer)

    with pytest.raises(EdgetrainError):
        load_and_compile()


def test_a_file_without_its_key_is_refused(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match="key"):
        et.Graph.load(path)
