"""Rows of objects and their places: the C code and the Python code answer alike, and see identity, not equality."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.native import same

ITEMS = [same.items, same.items_in_python]
FUNCTIONS = [same.functions, same.functions_in_python]


class Own(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        if key == "broken":
            raise ValueError(key)
        return super().__getitem__(key)


def test_the_library_is_there() -> None:
    assert same.items is not same.items_in_python


@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("kind", [dict, OrderedDict, Own, lambda values: types.MappingProxyType(dict(values))])
def test_the_first_that_differs(items: Callable[..., int], kind: Any) -> None:
    one, other = [1], [1]
    held = kind({"a": one, "b": other})
    assert items([(held, "a", one), (held, "b", other)], 0) == -1
    assert items([(held, "a", one), (held, "b", one), (held, "a", other)], 0) == 1
    assert items([(held, "a", one), (held, "b", one), (held, "a", other)], 2) == 2
    assert items([(held, "c", None)], 0) == 0
    assert items([], 0) == -1


@pytest.mark.parametrize("items", ITEMS)
def test_what_a_mapping_raises_comes_through(items: Callable[..., int]) -> None:
    with pytest.raises(ValueError, match="broken"):
        items([(Own(broken=1), "broken", 1)], 0)
    with pytest.raises(TypeError):
        items([({}, [], None)], 0)


@pytest.mark.parametrize("functions", FUNCTIONS)
def test_functions(functions: Callable[..., bool]) -> None:
    def first(a: int = 1, *, b: int = 2) -> int:
        return a + b

    def second() -> None: ...

    both: list[Any] = [first, second]
    before: list[same.FunctionRow] = [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in both]
    assert functions(before)
    for name, value in {"__defaults__": (1.0,), "__kwdefaults__": {"b": 2}, "__code__": second.__code__}.items():
        kept = getattr(first, name)
        setattr(first, name, value)
        assert not functions(before), name
        setattr(first, name, kept)
        assert functions(before)
    second.__defaults__ = ()
    assert not functions(before)


@pytest.mark.parametrize("wrong", [[()], [(1, 2)], [1], (), [({}, 1, 2, 3, 4)]])
def test_what_is_no_row_is_an_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        same.items(wrong, 0)
    with pytest.raises(TypeError):
        same.functions(wrong)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.integers(0, 3))), st.integers(0, 3))
def test_both_answer_alike(rows: list[tuple[int, str, int]], first: int) -> None:
    objects = [object() for _ in range(4)]
    held: list[dict[str, object]] = [{"a": objects[n], "b": objects[3 - n]} for n in range(3)]
    made: list[same.ItemRow] = [(held[n], key, objects[value]) for n, key, value in rows]
    assert same.items(made, first) == same.items_in_python(made, first)
