"""A converted nn.Linear: the class that convert gives a layer whose weight is a `PackedTensor`.

It has no state of its own. The weight is the only parameter beside the bias, `F.linear(x, weight, bias)` is what the
layer computes, and state_dict, adapters and serving engines see what they saw in an nn.Linear. The class only spares a
call what torch does with a tensor subclass: eager forwards go straight to the weight's `bound`, and compiled ones read
the weight's parts as plain tensors, because Dynamo guards on a subclass and flattens it in every step.

Those plain tensors are views of the weight's storage, kept in the module's `__dict__` and made anew whenever a weight
is set, moved, cast or unpickled. Codes that are written in place are seen by everything. When the weight's parts are
replaced (`weight.qdata = ...`, `swap_tensors`), it tells the module to forget them: compiled code then takes the
general path, with the new parts, until an eager forward makes the views anew. A float weight makes the module an
nn.Linear again. A weight that is written into `_parameters` by hand, as `functional_call` does, is seen by
eager forwards, and by code that is compiled after one; code that was compiled before keeps the weight that it had.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aoquant.distributed.fsdp import layer_class, swap_class
from aoquant.formats import Encoded, Scales
from aoquant.linear import siblings
from aoquant.linear.bound import BoundWeight
from aoquant.linear.function import Given, multiply
from aoquant.linear.prepared import rebind
from aoquant.linear.tensor import PackedTensor
from aoquant.ops import flops, linear_plan, router
from aoquant.ops.gemm import one_call
from aoquant.ops.repeat import PLAIN

_PARTS = ("_codes", "_scale", "_zero", "_outer", "_transform")  # views of the weight, of one name each
_OF = "_parts_of"  # the weight's `bound`, or None
_NAMES = (*_PARTS, "_recipe_key", "_one_call", "_dtype", _OF)


class PackedLinear(nn.Linear):
    """Multiply by packed codes as nn.Linear (K -> N). `adopt` makes it, in place, of one with a `PackedTensor`."""

    _recipe_key: str | None = None  # of the weight whose parts these are; None: none that compiled code reads apart
    _one_call: str = ""  # what csrc's operator for few rows is told, a number; "": it does not multiply these
    _dtype: torch.dtype
    _codes: Tensor
    _scale: Tensor | None
    _zero: Tensor | None
    _outer: Tensor | None
    _transform: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._traced(input)
        if not torch.is_grad_enabled():
            parameters = self._parameters
            weight = parameters.get("weight")
            if type(weight) is PackedTensor:
                bound = weight.bound
                if vars(self).get(_OF) is not bound:
                    _remember(self)
                # pruned, parametrised or a buffer, it is no parameter; nn.Module takes a microsecond to find it
                bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
                y = bound.product(input, bias)
                if y is not None:
                    return y
            elif vars(self).get(_OF) is not None:
                _forget(self)
        return F.linear(input, self.weight, self.bias)

    def _traced(self, input: Tensor) -> Tensor:
        """The forward that a compiler sees: one call on plain tensors, for an ordinary call without gradients."""
        few = self._one_call
        if few and not torch.is_grad_enabled() and (y := self._in_one_call(input, int(few))) is not None:
            return y
        key = self._recipe_key
        if (
            key is None
            or torch.is_grad_enabled()
            or not _is_ordinary(input, self._dtype, self._codes.device, self.in_features)
        ):
            return F.linear(input, self.weight, self.bias)
        parts = self._codes, self._scale, self._zero, self._outer, self._transform
        return _product(input, self.bias, key, self.in_features, *parts)

    def _in_one_call(self, input: Tensor, number: int) -> Tensor | None:
        """The operator of csrc, for an ordinary call of few rows; None for another."""
        codes, bias = self._codes, self.bias
        fp8 = linear_plan.is_fp8(number)
        k = codes.shape[1] if fp8 else codes.shape[1] * 2
        if (
            not _is_ordinary(input, linear_plan.dtype_of(number), codes.device, k)
            or not 0 < input.numel() <= one_call.MOST_ROWS * k
            or router.any_open
            or not (bias is None or _is_taken(bias, input.dtype, codes.shape[0]))
        ):
            return None
        scale = self._scale
        assert scale is not None
        zero = self._zero if linear_plan.has_zero(number) else None
        alpha = None if not linear_plan.has_alpha(number) else scale if fp8 else self._outer
        return torch.ops.aoquant_native.linear.default(input, codes, scale, zero, alpha, bias, number)

    def extra_repr(self) -> str:
        return described(super().extra_repr(), self.weight)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            if type(value) is PackedTensor or layer_class(self) is not PackedLinear:
                _remember(self)
            else:
                _forget(self)
                swap_class(self, nn.Linear)
                rebind(self)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name == "weight":
            _forget(self)

    def forget(self, bound: BoundWeight) -> None:
        """Drop the views of a weight whose parts were replaced, if these are its views."""
        if vars(self).get(_OF) is bound:
            _forget(self)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes to copy and pickle, without the views: each would become a tensor of its own."""
        return {name: value for name, value in vars(self).items() if name not in _NAMES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "_parent"})  # type: ignore[no-untyped-call]
        _remember(self)  # "_parent": of pickles until November 2026

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        _remember(self)
        return self


def adopt(module: nn.Module) -> None:
    """Make an nn.Linear with a packed weight a `PackedLinear`, in place; leave any other module as it is."""
    if layer_class(module) is nn.Linear and type(module._parameters.get("weight")) is PackedTensor:
        swap_class(module, PackedLinear)
        rebind(module)
        _remember(module)
        siblings.install()
        flops.register()


def described(layer: str, weight: Tensor) -> str:
    """Return what repr says of a layer with a quantised weight. layer: what it says of the plain layer."""
    describe = getattr(weight, "_quantization_type", None)
    kind = type(weight.data).__name__ if describe is None else f"{type(weight).__name__}({describe()})"
    return f"{layer}, weight={kind}"


def _remember(module: nn.Module) -> None:
    """Views of the weight's parts, made anew; none of a float weight."""
    _forget(module)
    attributes = vars(module)
    weight = module._parameters.get("weight")
    if type(weight) is not PackedTensor:
        return
    bound = attributes[_OF] = weight.bound
    bound.readers.add(module)
    parts = (weight.qdata, weight.scale, weight.zero_point, weight.per_tensor_scale, weight.act_pre_scale)
    for name, part in zip(_PARTS, parts, strict=True):
        attributes[name] = None if part is None else _static(part)
    attributes["_dtype"] = weight.dtype
    if bound.ordinary:
        attributes["_recipe_key"] = weight.recipe.key
        attributes["_one_call"] = bound.one_call


def _forget(module: nn.Module) -> None:
    for name in _NAMES:
        vars(module).pop(name, None)


def _is_ordinary(x: Tensor, dtype: torch.dtype | None, device: torch.device, k: int) -> bool:
    """Return whether one operator takes x as it is: a plain tensor of the layer's dtype, device and width."""
    return (
        type(x) in PLAIN
        and x.dtype == dtype
        and x.device == device
        and not torch.is_autocast_enabled(x.device.type)
        and x.dim() != 0
        and x.shape[-1] == k
    )


def _is_taken(bias: Tensor, dtype: torch.dtype, n: int) -> bool:
    """Return whether csrc's operator reads this bias."""
    return bias.dtype in (dtype, torch.float32) and bias.numel() == n and bias.is_contiguous()


def _static(part: Tensor) -> Tensor:
    """A view whose address and sizes a compiler takes as constants.

    The address: a CUDA graph then does not copy the view. Without guard=False each layer would be compiled apart.
    The sizes: a model that is compiled after one of another format would get symbols for them, as inputs of its graph.
    """
    view = part.detach()
    torch._dynamo.mark_static(view)
    torch._dynamo.mark_static_address(view, guard=False)
    return view


@torch.compiler.allow_in_graph
def _product(
    x: Tensor,
    bias: Tensor | None,
    key: str,
    k: int,
    codes: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    outer: Tensor | None,
    matrix: Tensor | None,
) -> Tensor:
    """y (..., N); one call to a compiler, see `function._applied`."""
    held = None if matrix is None else Scales(transform=matrix)
    y, _ = multiply(x, None, bias, Given(key, Encoded(codes, scale, zero, outer, k), held))
    return y
