"""What is captured: predictions that compute what the model does, a Hugging Face BERT as it is, names of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError
from tests.helpers.interpret import Interpreter
from tests.helpers.nets import CASES, F64, Case
from tests.helpers.plain import bits, differing, run, sgd, towards_ramp, training

# Reads a tensor that is not the model's; asks for a gradient.
NOT_PREDICTED = ("two closures", "gradient penalty")
# Plain PyTorch has a fused kernel for their predictions.
FUSED = ("multi-head attention", "transformer")


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in NOT_PREDICTED], ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
def test_prediction_is_what_the_model_gives_in_eval_mode(case: Case) -> None:
    model, batch = case.model(), case.batch()
    flags = [(name, module.training) for name, module in model.named_modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = et.capture_inference(model, batch)
    assert [(name, module.training) for name, module in model.named_modules()] == flags
    assert differing(model.state_dict(), before) == []
    assert {op.phase for op in graph.ops} <= {"forward"}
    assert not graph.gradients
    model.eval()
    torch.manual_seed(0)
    (found,) = Interpreter(graph, model, *batch).outputs()
    model.load_state_dict(before)
    torch.manual_seed(0)
    with torch.no_grad():
        right = model(*batch)
    if case.name.startswith(FUSED):
        assert torch.allclose(found, right, rtol=1e-12, atol=1e-12)
    else:
        assert torch.equal(bits(found), bits(right))


def test_prediction_of_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Any]:
            h = self.linear(x)
            return {"first": h.tanh(), "rest": (h.relu(), [h.sum()])}

    model, x = Two().double(), torch.randn(2, 3, dtype=F64)
    graph = et.capture_inference(model, (x,))
    h = model(x)
    expected = [h["first"], h["rest"][0], h["rest"][1][0]]
    for ours, theirs in zip(Interpreter(graph, model, x).outputs(), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "no tensor"

    with pytest.raises(UserError, match="Nothing returns no tensor"):
        et.capture_inference(Nothing(), (torch.ones(2),))


def test_a_buffer_that_takes_in_a_gradient_is_left_a_leaf() -> None:
    """Autograd notes a write on the tensor itself, however faked the kernel: nothing of that may stay."""

    class Keeps(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.linear(x)
            self.mean.mul_(0.5)
            self.mean[0] += h.mean(0)
            return h

    model, x = Keeps().double(), torch.randn(2, 3, dtype=F64)
    et.capture(model, towards_ramp, sgd(model.parameters()), (x,))
    assert model.mean.grad_fn is None
    assert not model.mean.requires_grad
    assert not model.mean.any()


# ---- a model of Hugging Face ----------------------------------------------------------------------------------


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=12,
    )  # fmt: skip
    model: nn.Module = transformers.BertModel(config).double().train()
    return model


def first_token_loss(model: nn.Module, tokens: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    hidden: Tensor = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    return F.cross_entropy(hidden[:, 0], y)


def test_bert_is_captured_unchanged() -> None:
    """With dropout, a padding mask and a pooler that the loss does not reach; five steps to the bit."""
    tokens = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([[9], [5], [7]])).long()
    batch = (tokens, mask, torch.tensor([3, 1, 15]))
    plain = training(bert(), first_token_loss)
    work = plain.twin()
    with pytest.raises(UserError, match=r"pooler\.dense") as refused:
        et.prepare(work.model, work.loss, work.optimizer, batch)
    assert 'unused="freeze"' in str(refused.value)
    step = et.prepare(work.model, work.loss, work.optimizer, batch, unused="freeze")
    assert step.graph.unused == ("pooler.dense.weight", "pooler.dense.bias")
    assert any(op.random for op in step.graph.ops)
    assert torch.equal(run(step, [batch] * 5), run(plain.plain_step, [batch] * 5))
    assert differing(work.snapshot(), plain.snapshot()) == []
    found = {op.module for op in step.graph.ops if op.phase == "backward"}
    assert any(name.startswith("encoder.layer.1.attention") for name in found)
    assert any(name.startswith("embeddings") for name in found)


# ---- where an op came from ------------------------------------------------------------------------------------


def test_every_op_knows_its_module() -> None:
    """Forward and backward ops carry the innermost module; what belongs to none is the loss's."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Sequential(nn.Conv2d(3, 2, 1), nn.Tanh()), nn.Flatten()
    ).double()
    graph = et.capture(model, towards_ramp, sgd(model.parameters()), (torch.randn(2, 2, 5, 5, dtype=F64),))
    kinds = {
        ("forward", "convolution"): {"0", "3.0"},
        ("backward", "convolution_backward"): {"0", "3.0"},
        ("forward", "native_batch_norm"): {"1"},
        ("backward", "native_batch_norm_backward"): {"1"},
        ("backward", "threshold_backward"): {"2"},
        ("backward", "tanh_backward"): {"3.1"},
        ("update", "sgd"): {"0", "1", "3.0"},
    }
    for (phase, kind), modules in kinds.items():
        found = {op.module for op in graph.ops if op.phase == phase and op.kind.split(".")[1] == kind}
        assert found == modules, (phase, kind)
    nameless = {op.kind.split(".")[1] for op in graph.ops if not op.module}
    assert not nameless & {"convolution", "native_batch_norm", "relu", "tanh"}
    assert "linspace" in nameless


def test_a_module_called_twice_is_named_each_time() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(torch.sin(self.inner(x)))
            return out

    model = Again().double()
    graph = et.capture(model, towards_ramp, sgd(model.parameters()), (torch.randn(2, 3, dtype=F64),))
    modules = [(op.module, op.kind) for op in graph.ops if op.kind in ("aten.addmm.default", "aten.sin.default")]
    assert modules == [("inner", "aten.addmm.default"), ("", "aten.sin.default"), ("inner", "aten.addmm.default")]
    assert sorted(graph.tensors[p].name for p in graph.gradients) == ["inner.bias", "inner.weight"]
