"""A weight that is read outside its layer is noticed in the first forward after prepare, or in its backward; other
reads are not.
"""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import Int8DynamicActivationInt8WeightConfig as torchao_int8

from aoquant import (
    HybridConfig,
    Int4WeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    calibrate,
    quantize_,
    report,
    unprepare,
    verify,
)
from aoquant.config import Int8WeightConfig
from aoquant.layers import direct_reads
from aoquant.layers.linear import unread
from aoquant.layers.qat import QATLayer

READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "F.linear": lambda x, w: F.linear(x, w),
    "operator": lambda x, w: x @ w.t(),
    "cast": lambda x, w: torch.matmul(x, w.to(torch.float64).to(x.dtype).T),
    "einsum": lambda x, w: torch.einsum("bk,nk->bn", x, w),
    "data": lambda x, w: torch.mm(x, w.data.t()),
}


class Model(nn.Module):
    """A layer that is called, and one whose weight is used by `read`."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        return self.b(x) if self.read is None else self.read(x, self.b.weight)


def prepared(model: nn.Module, config: Any = None, **kwargs: Any) -> nn.Module:
    quantize_(model, QATConfig(config or Int4WeightConfig(32), step="prepare"), **kwargs)
    return model


def said(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in found if "is read directly" in str(w.message) or "got a gradient" in str(w.message)]


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_a_direct_read_is_noticed_once_and_by_name(read: Callable[[Tensor, Tensor], Tensor], grad: bool) -> None:
    model, x = prepared(Model(read)), torch.randn(2, 64)
    with torch.set_grad_enabled(grad):
        first = said(lambda: model(x))
        assert len(first) == 1
        assert "the weight of b (by " in first[0]
        assert "leave it out of prepare" in first[0]
        assert said(lambda: model(x)) == []
    assert hooks(model) == torch._C._len_torch_function_stack() == 0


class _Product(torch.autograd.Function):
    """x W^T where no torch function sees W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        with torch._C.DisableTorchFunction():
            return x.detach().mm(w.detach().t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


def test_a_backward_after_another_recipe_belongs_to_the_forward_before_it() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(2, 64)
    quantize_(model, HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"))
    y = model(x)
    quantize_(model, HybridConfig.bwd("mxfp8"))
    assert said(lambda: y.sum().backward()) == []


def test_what_forward_hides_backward_shows() -> None:
    model, x = prepared(Model(_Product.apply)), torch.randn(2, 64)
    assert said(lambda: model(x)) == []
    found = said(lambda: model(x).sum().backward())
    assert len(found) == 1
    assert "the weight of b got a gradient although" in found[0]
    assert said(lambda: model(x).sum().backward()) == []
    assert hooks(model) == 0


def test_a_layer_that_runs_later_is_no_direct_read() -> None:
    class Branches(Model):
        late = False

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) if self.late else self.a(x)

    model, x = prepared(Branches(None)), torch.randn(2, 64)
    assert said(lambda: model(x).sum().backward()) == []
    model.late = True
    assert said(lambda: model(x).sum().backward()) == []
    assert hooks(model) == 0


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Reads every weight, and multiplies no activation by one."""
    total = model(x).sum() + 1e-4 * sum(p.pow(2).sum() for p in model.parameters())
    return total + sum(p.norm() for p in model.parameters())


class WithPenalty(Model):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.cat([self.a.weight, self.b.weight])
        assert self.a.weight.dtype == x.dtype
        return super().forward(x) + 1e-4 * weights.square().sum()


def test_reads_that_multiply_nothing_are_no_direct_reads() -> None:
    for config in (NVFP4WeightConfig(), Int4WeightConfig(32), Int8WeightConfig()):
        model, x = prepared(WithPenalty(None), config), torch.randn(2, 64)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)

        def step(model: nn.Module = model, x: Tensor = x, optimizer: Any = optimizer) -> None:
            penalty(model, x).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            nn.init.normal_(model.a.weight)

        assert said(step) == []
        assert said(step) == []


def test_tied_embedding_and_head_are_no_direct_read() -> None:
    class LM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.lm_head = nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32, bias=False)
            self.lm_head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.lm_head(self.up(self.embed(ids)))

    model = prepared(LM(), filter_fn=lambda m, fqn: True)
    assert said(lambda: model(torch.arange(8)).sum().backward()) == []


def test_reports_and_calibration_are_no_direct_reads() -> None:
    model, x = prepared(Model(None), Int8WeightConfig(activation="int8-tensor-static")), torch.randn(4, 64)
    assert said(lambda: calibrate(model, [x])) == []
    for forms in ((Model(None), None), (Model(None), 1)):
        other = prepared(Model(None))
        other.load_state_dict(forms[0].state_dict())
        converted = copy.deepcopy(other)
        quantize_(converted, QATConfig(step="convert"))
        assert said(lambda other=other, converted=converted: verify(other, converted, x)) == []
        assert said(lambda forms=forms, other=other: report(forms[0], other, x)) == []


def test_switched_off_layers_may_be_read() -> None:
    model = prepared(Model(READS["F.linear"]))
    model.b.fake_quant = False
    assert said(lambda: model(torch.randn(2, 64))) == []


def test_the_watch_survives_copies_and_pickles_and_is_taken_along() -> None:
    x = torch.randn(2, 64)
    for again in (copy.deepcopy, _pickled):
        model = again(prepared(Model(_linear)))
        assert list(model.state_dict()) == ["a.weight", "a.bias", "b.weight", "b.bias"]
        assert len(said(lambda model=model: model(x))) == 1
    for change in (lambda m: quantize_(m, QATConfig(step="convert")), unprepare):
        model = prepared(Model(None))
        change(model)
        assert said(lambda model=model: model(x)) == []
        assert hooks(model) == 0


def _linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def _pickled(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_an_error_in_the_first_forward_is_the_models_own_and_the_watch_goes_on() -> None:
    model = prepared(Model(_linear))
    for _ in range(2):
        with pytest.raises(ValueError, match="K = 64"):
            model(torch.randn(2, 32))
        assert torch._C._len_torch_function_stack() == 0
    assert len(said(lambda: model(torch.randn(2, 64)))) == 1
    assert hooks(model) == 0


def test_an_interrupted_first_forward_leaves_no_mode_behind() -> None:
    def interrupted(x: Tensor, w: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = prepared(Model(interrupted))
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, 64))
    model.read = None
    model(torch.randn(2, 64))
    assert torch._C._len_torch_function_stack() == 0
    assert hooks(model) == 0


def test_a_child_that_is_called_instead_of_the_model_is_watched() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(_linear)

    model = prepared(Wrapper())
    assert len(said(lambda: model.inner(torch.randn(2, 64)))) == 1


def test_compiled_models_are_not_watched() -> None:
    model = prepared(Model(_linear))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 64)
    assert said(lambda: compiled(x)) == []
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(x)


def test_the_first_forward_computes_what_later_ones_do() -> None:
    for config in (NVFP4WeightConfig(), Int4WeightConfig(32), Int8WeightConfig()):
        model, x = prepared(Model(None), config), torch.randn(2, 64)
        assert torch.equal(model(x), model(x))
        assert all(isinstance(m, QATLayer) for m in (model.a, model.b))


@pytest.mark.parametrize(("training", "grad"), [(True, True), (True, False), (False, True), (False, False)])
def test_models_with_attention_are_watched_unless_torch_may_take_its_fast_path(training: bool, grad: bool) -> None:
    model = prepared(nn.Sequential(nn.MultiheadAttention(64, 2), nn.Linear(64, 64))).train(training)
    with torch.set_grad_enabled(grad):
        direct_reads._begin(model, ())
        if (mode := direct_reads._current()) is not None:
            mode.__exit__(None, None, None)
    assert (mode is not None) == (training or grad)


def test_a_weight_outlives_its_layer() -> None:
    model, x = prepared(Model(_Product.apply)), torch.randn(2, 64)
    model(x)
    weight = model.b.weight
    del model.b
    gc.collect()
    assert said(lambda: weight.square().sum().backward()) == []  # type: ignore[operator]


def test_a_new_forward_ends_the_watch_of_an_interrupted_one_and_no_other() -> None:
    model, other = prepared(Model(None)), prepared(Model(None))
    try:
        direct_reads._begin(model, ())
        first = direct_reads._current()
        direct_reads._begin(other, ())
        assert direct_reads._current() is first is not None
        direct_reads._begin(model, ())
        assert torch._C._len_torch_function_stack() == 1 and direct_reads._current() is not first
    finally:
        while (mode := direct_reads._current()) is not None:
            mode.__exit__(None, None, None)


class Methods(Model):
    """Its other method reads the weight of `b`; its forward calls the layer."""

    def loss(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x), self.b.weight).sum()


def test_a_direct_read_in_another_method_shows_in_the_first_backward() -> None:
    model, x = prepared(Methods(None)), torch.randn(2, 64)
    found = said(lambda: model.loss(x).backward())
    assert len(found) == 1
    assert "the weight of b got a gradient although" in found[0]
    assert said(lambda: model.loss(x).backward()) == []
    assert said(lambda: model(x).sum().backward()) == []
    assert len(unread) == 0


def test_layers_that_run_are_forgotten_without_a_forward_of_the_model() -> None:
    model, x = prepared(Methods(None)), torch.randn(2, 64)
    assert said(lambda: model.b(model.a(x)).sum().backward()) == []
    assert len(unread) == 0
    off = prepared(Methods(None))
    off.b.fake_quant = False
    assert said(lambda: off.b(off.a(x)).sum().backward()) == []


def test_compiled_methods_are_not_watched() -> None:
    model, x = prepared(Methods(None)), torch.randn(2, 64)
    step = torch.compile(lambda x: model.b(model.a(x)).sum(), backend="aot_eager")
    assert said(lambda: step(x).backward()) == []
    assert len(unread) == 0


@pytest.mark.parametrize("config", [Int4WeightConfig(32), torchao_int8()], ids=["ours", "torchao"])
def test_a_packed_weight_that_is_read_is_named(config: Any) -> None:
    model, x = Model(READS["operator"]), torch.randn(2, 64)
    quantize_(model, config)
    for _ in range(2):
        with pytest.raises(
            NotImplementedError, match=r"the weight of b is read directly in forward \(by t\).*leave it out"
        ):
            model(x)
        assert torch._C._len_torch_function_stack() == 0


def test_packed_weights_in_f_linear_are_right_and_the_watch_ends() -> None:
    model, x = Model(READS["F.linear"]), torch.randn(2, 64)
    quantize_(model, Int4WeightConfig(32))
    called = copy.deepcopy(model)
    called.read = None
    called.b.bias = None
    assert said(lambda: model(x)) == []
    assert torch.equal(model(x), called(x))
    assert hooks(model) == 0


def test_an_error_of_a_packed_layers_own_forward_is_left_as_it_is() -> None:
    model = Model(None)
    quantize_(model, Int4WeightConfig(32))
    with pytest.raises(ValueError, match=r"^the layer's input needs K = 64"):
        model(torch.randn(2, 32))


def test_reads_of_a_float_model_are_found_before_anything_is_prepared() -> None:
    model, x = Model(READS["operator"]), torch.randn(2, 64)
    for layers, found in (({"a": model.a, "b": model.b}, {"b": "matmul"}), ({"a": model.a}, {})):
        with direct_reads.Watch(model, layers) as watch:
            model(x)
        assert watch.found == found
    assert torch._C._len_torch_function_stack() == 0


def test_a_forward_inside_an_exception_handler_is_watched_like_any() -> None:
    model = prepared(Model(_linear))

    def again() -> None:
        try:
            raise RuntimeError("out of memory")
        except RuntimeError:
            model(torch.randn(2, 64))

    assert len(said(again)) == 1
    assert hooks(model) == 0


def test_a_tied_head_that_reads_a_called_embedding_is_noticed() -> None:
    class LM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 64)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.embed(ids), self.embed.weight)

    model = prepared(LM(), filter_fn=lambda m, fqn: True)
    (text,) = said(lambda: model(torch.arange(8)).sum().backward())
    assert "the weight of embed (by linear)" in text


def test_an_embedding_that_only_a_hidden_product_reads_shows_in_backward() -> None:
    class LM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up = nn.Embedding(32, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return _Product.apply(self.up(x), self.embed.weight)

    model, x = prepared(LM(), filter_fn=lambda m, fqn: True), torch.randn(2, 64)
    (text,) = said(lambda: model(x).sum().backward())
    assert "the weight of embed got a gradient although" in text


def test_weights_that_no_gradient_reaches_are_noticed_in_forward() -> None:
    """Watch a frozen model, as under an adapter."""
    model, x = prepared(Model(_linear)).requires_grad_(False), torch.randn(2, 64, requires_grad=True)
    assert len(said(lambda: model(x).sum().backward())) == 1


def test_a_watched_model_moves_where_torch_swaps_the_tensors_of_parameters() -> None:
    model = prepared(Model(_linear), Int8WeightConfig())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert len(said(lambda: model(torch.ones(2, 64, dtype=torch.bfloat16)))) == 1


def test_the_hooks_of_weights_die_with_their_model() -> None:
    model = prepared(Model(None))
    assert {id(model.a.weight), id(model.b.weight)} <= set(unread)
    before = len(unread)
    del model
    gc.collect()
    assert len(unread) <= before - 2


def test_a_weight_may_be_gone_for_a_moment() -> None:
    """FSDP1 puts other tensors in place of parameters in forward, and sets each anew."""

    def exchange(x: Tensor, w: Tensor) -> Tensor:
        del model.b.weight
        model.b.weight = nn.Parameter(w.detach().clone())
        return x

    model = prepared(Model(exchange))
    assert said(lambda: model(torch.randn(2, 64))) == []
