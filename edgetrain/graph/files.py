"""Graphs in files: `Graph.save` and `Graph.load`. What is loaded is verified, for a file may come from anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgetrain import files, saved
from edgetrain.errors import UserError
from edgetrain.graph.ir import Graph, from_json, to_json
from edgetrain.graph.verify import broken_rules, unknown_kinds

__all__ = ["Graph", "load", "save"]


def save(graph: Graph, path: str | Path) -> None:
    """The graph and its key, by which `load` recognises a file that was changed since."""
    files.write_text(path, json.dumps({**to_json(graph), "key": graph.key}))


def load(path: str | Path) -> Graph:
    next_step = "create it anew with `edgetrain graph MODEL --out FILE`"
    graph = saved.load(path, "graph file", _with_key, next_step=next_step)
    broken = [*unknown_kinds(graph), *broken_rules(graph)]
    if broken:
        raise UserError(f"{path} holds no legal graph", received="; ".join(broken[:3]))
    return graph


def _with_key(data: Any) -> Graph:
    graph = from_json(data)
    if data["key"] != graph.key:
        raise ValueError(f"the content has key {graph.key}, expected {data['key']!r}")
    return graph


Graph.save = save
Graph.load = staticmethod(load)
