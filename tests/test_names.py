from edgetrain.names import short_name, take_free_name


def test_short_names_leave_out_namespace_and_overload() -> None:
    assert (short_name("aten.add.Tensor"), short_name("edgetrain.norm.apply")) == ("add", "norm.apply")


def test_a_free_name_is_taken_from_then_on() -> None:
    taken = {"w", "w_2"}
    assert [take_free_name(name, taken) for name in ("w", "w", "b")] == ["w_3", "w_4", "b"]
    assert taken == {"w", "w_2", "w_3", "w_4", "b"}
