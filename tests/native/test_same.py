"""Rows of objects and their places: the C code and the Python code answer alike, and see identity, not equality."""

from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.native import same

PLACES = [same.Places, same.PlacesInPython]
FUNCTIONS = [same.functions, same.functions_in_python]
LISTS = [same.lists, same.lists_in_python]
SETS = [same.sets, same.sets_in_python]


def _anew(dicts: Callable[[list[same.DictRow], bytearray], bool]) -> Callable[[list[same.DictRow]], bool]:
    return lambda rows: dicts(rows, same.no_versions(rows) if isinstance(rows, list) else bytearray())


DICTS = [_anew(same.dicts), _anew(same.dicts_in_python)]


class Own(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        if key == "broken":
            raise ValueError(key)
        return super().__getitem__(key)


def test_the_library_is_there() -> None:
    assert same.Places is not same.PlacesInPython


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kind", [dict, OrderedDict, Own, lambda values: types.MappingProxyType(dict(values))])
def test_the_first_that_differs(places: Any, kind: Any) -> None:
    one, other = [1], [1]
    held = kind({"a": one, "b": other})
    rows = [(held, 2, ("a", "b"), (one, other)), (held, None, ("a", "b"), (one, one)), (held, 3, (), ())]
    assert places(rows[:1]).changed(0) == -1
    assert [places(rows).changed(first) for first in range(4)] == [1, 1, 2, -1]
    assert places([(held, None, ("c",), (None,))]).changed(0) == 0
    assert places([]).changed(0) == -1


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kind", [dict, OrderedDict, Own])
def test_every_way_to_write_shows(places: Any, kind: Any) -> None:
    one, other = [1], [1]
    changes: list[Callable[[Any], object]] = [
        lambda d: d.__setitem__("a", other), lambda d: d.update(a=other), lambda d: d.pop("a"), lambda d: d.clear(),
        lambda d: d.__ior__({"b": other}), lambda d: d.setdefault("new", one), lambda d: d.popitem(),
        lambda d: d.__delitem__("b"), lambda d: (d.pop("a"), d.setdefault("a", other)),
    ]  # fmt: skip
    for change in changes:
        held = kind({"a": one, "b": one})
        asked = places([(held, 2, ("a", "b"), (one, one))])
        assert asked.changed(0) == asked.changed(0) == -1
        change(held)
        assert asked.changed(0) == asked.changed(0) == 0
        held.clear()
        held.update(a=one, b=one)
        assert asked.changed(0) == -1


@pytest.mark.parametrize("places", PLACES)
def test_attributes_of_classes_and_objects(places: Any) -> None:
    class Some:
        a = 1

    thing = Some()
    thing.b = one = [1]  # type: ignore[attr-defined]
    asked = places([(Some, len(vars(Some)), ("a",), (1,)), (vars(thing), 1, ("b",), (one,))])

    def write(value: object) -> None:
        thing.b = value  # type: ignore[attr-defined]

    for _ in range(20):  # until the interpreter has specialised the write
        write(one)
        assert asked.changed(0) == -1
    for _ in range(20):
        write([1])
        assert asked.changed(0) == 1
        write(one)
        assert asked.changed(0) == -1
    Some.a = 2
    assert asked.changed(0) == 0
    Some.a = 1
    assert asked.changed(0) == -1
    Some.new = 1  # type: ignore[attr-defined]
    assert asked.changed(0) == 0


@pytest.mark.parametrize("places", PLACES)
def test_how_many_there_are(places: Any) -> None:
    empty: list[Any] = [set(), deque(), OrderedDict(), [], {}]
    asked = places([(container, 0, (), ()) for container in empty])
    assert asked.changed(0) == -1
    for number, fill in enumerate((set.add, deque.append, None, list.append, None)):
        fill(empty[number], 1) if fill else empty[number].update(a=1)
        assert asked.changed(number) == number


@pytest.mark.parametrize("places", PLACES)
def test_what_a_mapping_raises_comes_through(places: Any) -> None:
    with pytest.raises(ValueError, match="broken"):
        places([(Own(broken=1), None, ("broken",), (1,))]).changed(0)
    with pytest.raises(TypeError):
        places([({}, None, ([],), (None,))]).changed(0)


def test_no_memory_is_kept() -> None:
    class Some:
        pass

    thing = Some()
    thing.places = same.Places([(vars(thing), None, (), ())])  # type: ignore[attr-defined]
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("kind", "functions"), [(list, LISTS), (set, SETS), (dict, DICTS)])
def test_containers(kind: Any, functions: list[Any]) -> None:
    one, other = object(), object()
    held: Any = {"a": one, "b": other} if kind is dict else kind((one, other))
    parts = ("a", one, "b", other) if kind is dict else tuple(held)
    for holds in functions:
        assert holds([(held, parts)])
        assert holds([(kind(), ())])
        assert not holds([(held, parts[:-1])])
        assert not holds([(held, parts), (held, (*parts[:-1], object()))])
        assert not holds([(kind(), parts)])
    with pytest.raises(TypeError):
        functions[0]([((), ())])
    with pytest.raises(TypeError):
        functions[0]([(held, [])])


@given(st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_sets_with_gaps(members: list[int], removed: list[int]) -> None:
    held = set(members)
    for member in removed:
        held.discard(member)
    then = tuple(held)
    for sets in SETS:
        assert sets([(held, then)])
        assert not sets([(held | {99}, then)])
        assert not sets([(held, (*then, 99))])
        assert not then or not sets([(held - {then[-1]}, then)])


@pytest.mark.parametrize("dicts", [same.dicts, same.dicts_in_python])
def test_a_dict_that_was_found_the_same_and_written_to(dicts: Callable[[list[same.DictRow], bytearray], bool]) -> None:
    one, other = [1], [1]
    held: dict[str, Any] = {"a": one}
    rows: list[same.DictRow] = [(held, ("a", one))]
    versions = same.no_versions(rows)
    assert dicts(rows, versions)
    assert dicts(rows, versions)
    held["a"] = other
    assert not dicts(rows, versions)
    held["a"] = one
    assert dicts(rows, versions)
    held["b"] = one
    assert not dicts(rows, versions)


def test_versions_of_other_rows_are_refused() -> None:
    with pytest.raises(TypeError):
        same.dicts([({}, ())], bytearray(7))


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


@pytest.mark.parametrize("objects", [same.objects, same.objects_in_python])
def test_objects(objects: Callable[[Any], bool]) -> None:
    class Some:
        pass

    class Other(Some):
        pass

    thing = Some()
    rows = [(1, int, None), (thing, Some, vars(thing)), (Some, type, None)]
    assert objects(rows)
    thing.a = 1  # type: ignore[attr-defined]
    assert objects(rows)
    thing.__class__ = Other
    assert not objects(rows)
    thing.__class__ = Some
    assert objects(rows)
    thing.__dict__ = {}
    assert not objects(rows)
    with pytest.raises(AttributeError):
        objects([(1, int, {})])


@pytest.mark.parametrize("orders", [same.orders, same.orders_in_python])
def test_orders(orders: Callable[[Any], bool]) -> None:
    class First:
        pass

    class Second:
        pass

    class Some(First):
        pass

    rows = [(int, int.__mro__), (Some, Some.__mro__)]
    assert orders(rows)
    Some.__bases__ = (Second,)
    assert not orders(rows)


@pytest.mark.parametrize("wrong", [[()], [(1, 2)], [1], (), [({}, 1, 2, 3, 4)], [({}, None, (), (1,))]])
def test_what_is_no_row_is_an_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        same.Places(wrong)
    with pytest.raises(TypeError):
        same.functions(wrong)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.integers(0, 3))), st.integers(0, 3), st.data())
def test_both_answer_alike(rows: list[tuple[int, str, int]], first: int, data: st.DataObject) -> None:
    objects = [object() for _ in range(4)]
    held: list[dict[str, object]] = [{"a": objects[n], "b": objects[3 - n]} for n in range(3)]
    made: list[same.PlaceRow] = [(held[n], None, (key,), (objects[value],)) for n, key, value in rows]
    both = [places(made) for places in PLACES]
    for _ in range(data.draw(st.integers(1, 5))):
        assert len({places.changed(first) for places in both}) == 1
        held[data.draw(st.integers(0, 2))][data.draw(st.sampled_from("abc"))] = objects[data.draw(st.integers(0, 3))]
    assert len({places.changed(first) for places in both}) == 1
