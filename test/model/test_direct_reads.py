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

from aoquant import HybridConfig, QATConfig, calibrate, quantize_, report, unprepare, verify
from aoquant.linear import direct_reads
from aoquant.linear.checks import unread

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
    quantize_(model, QATConfig(config or "int4-g32", step="prepare"), **kwargs)
    return model


def said(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as found:
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
        assert len(first) == 1 and "weight of b " in first[0]
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
    (text,) = said(lambda: model(x).sum().backward())
    assert "weight of b " in text
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


def test_layers_that_are_prepared_one_after_the_other_are_watched_by_one_pair_of_hooks() -> None:
    model = prepared(Model(READS["operator"]), filter_fn=lambda m, fqn: fqn == "a")
    once = hooks(model)
    prepared(model, filter_fn=lambda m, fqn: fqn == "b")
    assert hooks(model) == once == 2


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


class WithPenalty(Model):
    """Reads every weight, and multiplies no activation by one."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.cat([self.a.weight, self.b.weight])
        assert self.a.weight.dtype == x.dtype
        return super().forward(x) + 1e-4 * weights.square().sum() + self.a.weight.norm()


@pytest.mark.parametrize("config", ["nvfp4", "int4-g32", "int8-weight"], ids=str)
def test_reads_that_multiply_nothing_are_no_direct_reads(config: Any) -> None:
    model, x = prepared(WithPenalty(None), config), torch.randn(2, 64)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)

    def step() -> None:
        (model(x).sum() + sum(p.norm() for p in model.parameters())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        nn.init.normal_(model.a.weight)

    assert said(step) == said(step) == []


def test_what_reads_weights_for_itself_is_no_direct_read() -> None:
    """Calibration, reports, layers whose fake quantisation is off, and what torch.compile compiles."""
    model, x = prepared(Model(None), "int8-static"), torch.randn(4, 64)
    assert said(lambda: calibrate(model, [x])) == []
    plain, other = Model(None), prepared(Model(None))
    converted = copy.deepcopy(other)
    quantize_(converted, QATConfig(step="convert"))
    assert said(lambda: verify(other, converted, x)) == said(lambda: report(plain, other, x)) == []
    off = prepared(Model(READS["F.linear"]))
    off.b.fake_quant = False
    assert said(lambda: off(x)) == []
    compiled = torch.compile(prepared(Model(_linear)), backend="eager", fullgraph=True)
    assert said(lambda: compiled(x)) == []
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(x)


class LM(nn.Module):
    """An embedding and a tied head, which is called, or is read by `read`."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.embed, self.up, self.lm_head = nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32, bias=False)
        self.lm_head.weight = self.embed.weight
        self.read = read

    def forward(self, ids: Tensor) -> Tensor:
        x = self.up(self.embed(ids))
        return self.lm_head(x) if self.read is None else self.read(x, self.embed.weight)


def test_a_tied_head_is_noticed_where_it_is_read_and_not_where_it_is_called() -> None:
    """In forward, or in backward where a product is hidden: of an embedding that nothing calls, too."""
    ids = torch.arange(8)
    for read in (None, F.linear):
        model = prepared(LM(read), filter_fn=lambda m, fqn: True)
        found = said(lambda model=model: model(ids).sum().backward())
        assert len(found) == (read is not None) and all("weight of embed" in text for text in found)
    hidden = prepared(LM(_Product.apply), filter_fn=lambda m, fqn: True)
    (text,) = said(lambda: hidden.read(hidden.up(torch.randn(2, 64)), hidden.embed.weight).sum().backward())
    assert "weight of embed" in text


def test_a_failed_first_forward_leaves_no_mode_behind_and_the_watch_goes_on() -> None:
    def interrupted(x: Tensor, w: Tensor) -> Tensor:
        raise KeyboardInterrupt

    for error, read, width in ((ValueError, _linear, 32), (KeyboardInterrupt, interrupted, 64)):
        model = prepared(Model(read))
        for _ in range(2):
            with pytest.raises(error):
                model(torch.randn(2, width))
            assert error is KeyboardInterrupt or torch._C._len_torch_function_stack() == 0
        model.read = _linear
        assert len(said(lambda model=model: model(torch.randn(2, 64)))) == 1
        assert hooks(model) == torch._C._len_torch_function_stack() == 0


def _caught(model: Model, x: Tensor) -> None:
    try:
        raise RuntimeError("out of memory")
    except RuntimeError:
        model(x)


def _swapped(model: Model, x: Tensor) -> None:
    """Move the model where torch swaps the tensors of parameters."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model(x.bfloat16())


WAYS: dict[str, Callable[[Model, Tensor], Any]] = {
    "a child of the model": lambda model, x: model(x),
    "in an exception handler": _caught,
    "frozen, as under an adapter": lambda model, x: model.requires_grad_(False)(x.requires_grad_()).sum().backward(),
    "swapped": _swapped,
}


@pytest.mark.parametrize("way", WAYS)
def test_however_it_runs_a_read_is_noticed_once(way: str) -> None:
    whole = prepared(nn.ModuleDict({"inner": Model(_linear)}), "int8-weight")
    assert len(said(lambda: WAYS[way](whole["inner"], torch.randn(2, 64)))) == 1  # type: ignore[index]


class Methods(Model):
    """Its other method reads the weight of `b`; its forward calls the layer."""

    def loss(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x), self.b.weight).sum()


def test_a_direct_read_in_another_method_shows_in_the_first_backward() -> None:
    model, x = prepared(Methods(None)), torch.randn(2, 64)
    (text,) = said(lambda: model.loss(x).backward())
    assert "weight of b " in text
    assert said(lambda: model.loss(x).backward()) == []
    assert said(lambda: model(x).sum().backward()) == []
    assert not {id(model.a.weight), id(model.b.weight)} & set(unread)


def test_layers_that_run_are_forgotten_without_a_forward_of_the_model() -> None:
    """Called, switched off, or compiled."""
    x = torch.randn(2, 64)
    for off, compiled in ((False, False), (True, False), (False, True)):
        model = prepared(Methods(None))
        model.b.fake_quant = not off
        step: Any = lambda x, model=model: model.b(model.a(x)).sum()  # noqa: E731 - of this turn's model
        run = torch.compile(step, backend="aot_eager") if compiled else step
        assert said(lambda run=run: run(x).backward()) == []
        assert off or not {id(model.a.weight), id(model.b.weight)} & set(unread)


@pytest.mark.parametrize("config", ["int4-g32", torchao_int8()], ids=["ours", "torchao"])
def test_a_packed_weight_that_is_read_is_named(config: Any) -> None:
    model, x = Model(READS["operator"]), torch.randn(2, 64)
    quantize_(model, config)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"weight of b .*\(by t\)"):
            model(x)
        assert torch._C._len_torch_function_stack() == 0


def test_packed_weights_in_f_linear_are_right_and_the_watch_ends() -> None:
    model, x = Model(READS["F.linear"]), torch.randn(2, 64)
    quantize_(model, "int4-g32")
    called = copy.deepcopy(model)
    called.read = None
    called.b.bias = None
    assert said(lambda: model(x)) == []
    assert torch.equal(model(x), called(x))
    assert hooks(model) == 0


def test_reads_of_a_float_model_are_found_before_anything_is_prepared() -> None:
    model, x = Model(READS["operator"]), torch.randn(2, 64)
    for layers, found in (({"a": model.a, "b": model.b}, {"b": "matmul"}), ({"a": model.a}, {})):
        with direct_reads.Watch(model, layers) as watch:
            model(x)
        assert watch.found == found
    assert torch._C._len_torch_function_stack() == 0


def test_the_hooks_of_weights_die_with_their_model() -> None:
    """And a weight outlives its layer."""
    model, x = prepared(Model(_Product.apply)), torch.randn(2, 64)
    model(x)
    weight = model.b.weight
    del model.b
    gc.collect()
    assert said(lambda: weight.square().sum().backward()) == []  # type: ignore[operator]
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
