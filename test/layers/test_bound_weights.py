"""What a packed weight remembers of its product: a kernel for each number of rows, and when another answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.linear_cases import BF16, BY_NAME, assert_equal, data
from support.packed_cases import dynamo_afresh, general, packed
from torch import Tensor, nn
from torch.nn import functional as F

import aoquant
from aoquant import WUSH, NVFP4WeightConfig, QATConfig, backend, explain, get_format, quantize_
from aoquant.layers.recipe import LinearRecipe
from aoquant.ops import router
from aoquant.ops.gemm import one_call
from aoquant.ops.router import Backend
from aoquant.tensor import PackedTensor

fresh_dynamo = pytest.fixture(dynamo_afresh, autouse=True)


class Recorder:
    """A GEMM that multiplies as the reference does and counts what it is asked for, bound or not."""

    def __init__(self, binds: bool = True) -> None:
        self.bound = self.called = self.asked = 0
        self.backend = Backend("recorder", 50, self.why_not, self.run, bind=self.bind if binds else None)

    def why_not(self, r: Any) -> None:
        self.asked += 1

    def run(self, c: Any) -> Tensor:
        self.called += 1
        return next(b for b in router._backends if (b.name, b.role) == ("reference", "gemm")).run(c)

    def bind(self, r: Any, w: Any) -> Any:
        f = r.w_format

        def product(x: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
            self.bound += 1
            acc = x.float() @ f.operand(w, x.dtype).float().t()
            for alpha in (alpha_x, None if f.alpha(w) is None else f.alpha(w).t()):
                acc = acc if alpha is None else acc * alpha
            return (acc if bias is None else acc + bias.float()).to(x.dtype)

        return product


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(router, "_backends", list(router._backends))
    monkeypatch.setattr(router, "_routes", {})
    made = Recorder()
    router.register(made.backend)
    return made


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4-act", "fp8-row-act"])
def test_the_router_is_asked_once_for_each_number_of_rows(name: str, recorder: Recorder) -> None:
    module, k = packed(name), BY_NAME[name].k
    with torch.no_grad():
        for rows in (1, 3):
            x = data("normal", rows, k, BF16)
            with backend("reference"):
                want = module(x)
            for _ in range(3):
                assert_equal(module(x), want)
                assert_equal(module(x.view(1, rows, k)), want.view(1, rows, -1))
    assert recorder.bound == 12 and recorder.called == 0 and recorder.asked == 2
    assert explain(module).routes[-1].backend == "recorder"


@pytest.mark.parametrize("how", ["context", "environment", "registered"])
def test_what_is_forced_or_registered_later_rules(
    how: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = packed("int4-g32"), data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    with torch.no_grad():
        module(x)
        assert recorder.bound == 1
        if how == "context":
            with backend("reference"):
                module(x)
                F.linear(x, module.weight, module.bias)
        elif how == "environment":
            with monkeypatch.context() as m:
                m.setenv("AOQUANT_BACKEND", "reference")
                module(x)
                m.setenv("AOQUANT_BACKEND", "nothing")
                with pytest.raises(ValueError, match="nothing"):
                    module(x)
        else:
            later = Recorder()
            object.__setattr__(later.backend, "priority", 60)
            router.register(later.backend)
            module(x)
            assert later.bound == 1
        assert recorder.bound == 1 and recorder.called == 0


def test_a_bound_weight_takes_the_operator_of_a_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = packed("int4-g32"), list[int]()
    x = data("normal", 3, BY_NAME["int4-g32"].k, BF16)
    monkeypatch.setattr(one_call, "number", lambda *a: 7)
    monkeypatch.setattr(one_call, "multiplier", lambda number, f, w, dtype, general: made.append(number) or general)
    weight = PackedTensor.from_encoded(module.weight.encoded, module.weight.recipe, BF16)
    with torch.no_grad():
        assert_equal(F.linear(x, weight, module.bias), general(module, x))
    assert made == [7]


def test_bound_weights_answer_ordinary_calls_alone() -> None:
    module = packed("nvfp4-act")
    bound, x = module.weight.bound, data("normal", 3, BY_NAME["nvfp4-act"].k, BF16)
    with torch.no_grad():
        y = bound.product(x, None)
        assert y is not None and bound.ordinary
        assert_equal(y, F.linear(x, module.weight))
        assert_equal(bound.product(x[:0], None), F.linear(x, module.weight)[:0])
        assert bound.product(x[0, 0], None) is None and bound.product(x[:, :-1], None) is None
        with torch.autocast("cpu", torch.float16):
            assert bound.product(x, None) is None
            assert F.linear(x, module.weight).dtype == torch.float16
        assert bound.product(x, None) is not None


def test_a_bound_weight_refuses_what_its_kernel_cannot_take() -> None:
    format = get_format("int4-g32")
    e = format.encode(torch.randn(16, 64))
    weights = {
        d: PackedTensor.from_encoded(e, LinearRecipe(None, format, "bias_after"), d) for d in (BF16, torch.float32)
    }
    assert weights[BF16].bound.ordinary and not weights[torch.float32].bound.ordinary
    with torch.no_grad(), pytest.raises(ValueError, match="takes bfloat16 activations"):
        F.linear(torch.randn(3, 64), weights[torch.float32])


def test_what_a_product_of_codes_alone_cannot_do_takes_the_general_path(recorder: Recorder) -> None:
    """A batch without rows, and a fitted transform, whose matrices the bound product is not given."""
    module = packed("int4-g32")
    with torch.no_grad():
        assert module(data("normal", 3, BY_NAME["int4-g32"].k, BF16)[:0]).shape == (0, module.out_features)
    assert recorder.bound == 0
    fitted = nn.Sequential(nn.Linear(64, 32).bfloat16())
    quantize_(fitted, QATConfig(NVFP4WeightConfig(activation="nvfp4", transform=WUSH(16))))
    x = torch.randn(8, 64).bfloat16()
    aoquant.calibrate(fitted, [x])
    y = fitted(x)
    quantize_(fitted, QATConfig(step="convert"))
    with torch.no_grad():
        assert_equal(fitted(x), y)
    assert recorder.bound == 0


def test_a_weight_remembers_a_bounded_number_of_rows() -> None:
    """Where every batch has another number: a step takes a kilobyte, and a model has hundreds of layers."""
    module, case = packed("int4-g32"), BY_NAME["int4-g32"]
    with torch.no_grad():
        for rows in range(1, 300):
            x = data("normal", rows, case.k, BF16)
            y = module(x)
        assert_equal(y, general(module, x))
    assert len(module.weight.bound._multipliers) <= 128
