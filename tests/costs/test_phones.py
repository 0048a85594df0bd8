"""The device model predicts what EMDL'21 measured on two phones, from a fit on the other half of the measurements."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import edgetrain as et
from benchmarks import phone_fit, phone_nets
from edgetrain.costs.model import resident_bytes
from edgetrain.devices.device import load
from edgetrain.errors import UserError

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("EDGETRAIN_DATA" not in os.environ, reason="EDGETRAIN_DATA does not name the data folder"),
]


@pytest.fixture(scope="module")
def rows() -> list[phone_fit.Row]:
    data = Path(os.environ["EDGETRAIN_DATA"]) / "emdl21-phones"
    return [row for row in phone_fit.read(data) if row.batch in phone_fit.BATCHES]


@pytest.fixture(scope="module")
def counts() -> phone_fit.Count:
    return phone_fit.counter()


def test_the_half_that_is_not_fitted_is_predicted(rows: list[phone_fit.Row], counts: phone_fit.Count) -> None:
    first, second = phone_fit.halves()
    assert len(rows) == 50
    assert first | second == set(phone_fit.PAIRS)
    assert not first & second
    for fitted, predicted in ((first, second), (second, first)):
        found = phone_fit.held_out(rows, counts, fitted)
        assert len(found.time) == 2 * len(predicted)
        assert found.median_time <= 0.30
        assert found.median_memory <= 0.20


def test_the_device_files_hold_what_is_fitted(rows: list[phone_fit.Row], counts: phone_fit.Count) -> None:
    found = phone_fit.fit(rows, counts)
    for phone, own in found.phones.items():
        device = load(phone)
        processor, library = device.processor, device.library
        for quantity, value in (
            (processor.conv_flop_s, own.flop_s), (processor.dense_flop_s, own.flop_s),
            (processor.depthwise_flop_s, own.flop_s), (device.memory.bandwidth_bytes_s, own.bandwidth_bytes_s),
            (library.overhead_s, own.overhead_s), (library.base_bytes, found.base_bytes),
            (library.lasting, found.lasting), (library.held, found.held), (library.columns, found.columns),
        ):  # fmt: skip
            assert quantity is not None
            assert quantity.source.startswith("fitted to emdl21-phones")
            assert quantity.value == pytest.approx(value, rel=0.005)


def test_the_fit_and_the_model_are_one(counts: phone_fit.Count) -> None:
    """What is fitted is what `model_costs` computes op by op, at a batch size that was not captured for the fit."""
    batch = 3
    net = phone_nets.NETS["Squeezenet"]()
    updates = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    graph = et.capture(net, phone_fit.loss, updates, phone_nets.example("Squeezenet", batch))
    device = load("meizu_16t")
    modelled = sum(op.time_s for op in et.model_costs(graph, device).ops)
    own, library = device.processor, device.library
    assert own.conv_flop_s is not None
    weights = (1 / own.conv_flop_s.value, 1 / device.memory.bandwidth_bytes_s.value, library.overhead_s.value)
    counted = counts(("Squeezenet", batch))
    assert modelled == pytest.approx(sum(w * x for w, x in zip(weights, counted.for_time, strict=True)), rel=1e-6)
    assert library.base_bytes is not None
    factors = [q.value for q in (library.base_bytes, library.lasting, library.held, library.columns) if q is not None]
    expected = sum(w * x for w, x in zip(factors, counted.for_memory, strict=True))
    assert resident_bytes(graph, device) == pytest.approx(expected, rel=1e-6)


def test_the_networks_have_the_parameters_of_the_released_code() -> None:
    """As counted from that code; see zoo/models/published.py."""
    expected = {"Lenet": 349_980, "Alexnet": 30_006_666, "Squeezenet": 740_554, "GoogLenet": 5_979_642}
    for name, parameters in expected.items():
        assert sum(p.numel() for p in phone_nets.NETS[name]().parameters()) == parameters


def test_data_that_is_not_what_it_should_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not hold what EMDL'21 measured"):
        phone_fit.read(tmp_path)
