"""A packed weight bound to its kernels, so that a call without gradients costs little more than a launch.

The format, contract, shape, dtype and device of a packed weight never change. So the recipe, the views that a kernel
wants of the codes, and the backend for each number of rows are looked up once, by the same router that the prepared
layer asks, and kept beside the codes. A bound weight holds views and never copies: codes that are written in place
(`load_state_dict`, `refresh_`) are seen. On a GPU calls of few rows whose input is encoded become programs of csrc's
step library (replay.py).

A bound weight ends when a part of its weight is replaced. The layers that hold views of these parts are told so.

It answers ordinary calls alone: a plain tensor of the weight's dtype, on its device, without autocast, modes or a
forced backend. For any other call it returns None, and the caller takes the general path, with its checks and errors.
"""

from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_torch_function_mode_enabled,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad

from aoquant.formats import Encoded, Scales
from aoquant.linear import replay
from aoquant.linear.function import Given, multiply
from aoquant.linear.recipe import LinearRecipe
from aoquant.ops import codec, gemm_request, input_error, native_step, reads, repeat, router
from aoquant.ops.gemm import one_call
from aoquant.ops.gemm.one_call import Multiplier
from aoquant.ops.quantized import Ask

_MOST_ROWS = 1 << 7  # up to which programs are made, and whose multipliers, about a kilobyte each, a weight remembers


class BoundWeight:
    """How one packed weight (N, K) of `dtype` is multiplied, by the number of rows of x.

    ordinary: whether its kernel takes inputs of `dtype`, and it holds values. readers: the layers that hold views of
    its parts.
    """

    # fmt: off
    __slots__ = (
        "_device", "_dtype", "_generation", "_given", "_k", "_multipliers", "_n", "_recipe", "_w",
        "ordinary", "readers",
    )
    # fmt: on

    def __init__(self, w: Encoded, recipe: LinearRecipe, dtype: torch.dtype, matrix: Tensor | None) -> None:
        self._w, self._recipe, self._dtype, self._device = w, recipe, dtype, w.codes.device
        self._n, self._k = w.codes.shape[0], w.k
        stored = dtype if w.scale is None else w.scale.dtype
        self.ordinary = self._device.type in ("cpu", "cuda") and input_error(recipe.contract, dtype, stored) is None
        self._given = Given(recipe.key, w, None if matrix is None else Scales(transform=matrix))
        self._multipliers: dict[int, Multiplier] = {}
        self._generation = router.generation()
        self.readers: WeakSet[Any] = WeakSet()

    def end(self) -> None:
        """Forget the multipliers, which hold codes, and have the layers that read it forget their views."""
        self._multipliers = {}
        for reader in list(self.readers):
            reader.forget(self)

    @property
    def one_call(self) -> str:
        """The number that csrc's operator is told for every number of rows that it takes; "" where a compiler is not to
        call it.
        """
        recipe, w_as = self._recipe, self._recipe.fprop_weight
        if not self.ordinary or self._given.x_held is not None or router.forcing():
            return ""
        named = recipe.contract, recipe.fprop_input, w_as, self._w, self._dtype
        first = one_call.number(*named, 1)
        return str(first) if first is not None and first == one_call.number(*named, one_call.MOST_ROWS) else ""

    def __deepcopy__(self, memo: Any) -> None:
        """A copied weight makes its own."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """y (..., N) = x (..., K) W^T + bias; None for a call that is not ordinary. Only without gradients."""
        if (
            x.dtype is not self._dtype
            or type(x) not in repeat.PLAIN
            or not self.ordinary
            or x.device != self._device
            or x.is_neg()
            or _len_torch_dispatch_stack()
            or _is_any_autocast_enabled()
            or _is_torch_function_mode_enabled()
            or (
                bias is not None
                and (
                    type(bias) not in repeat.PLAIN
                    or bias.device != self._device
                    or bias.shape != (self._n,)
                    or not bias.is_contiguous()
                )
            )
            or router.forcing()
            or _are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        ):
            return None
        shape, k = x.shape, self._k
        if not shape or shape[-1] != k:
            return None
        m = x.numel() // k if k else 0
        if self._generation != router.generation():
            self._multipliers, self._generation = {}, router.generation()
        multiplier = self._multipliers.get(m)
        if multiplier is None:
            multiplier = self._made(m)
        return multiplier(x, bias)

    def _made(self, m: int) -> Multiplier:
        if len(self._multipliers) >= _MOST_ROWS:
            self._multipliers = {}
        multiplier = self._multipliers[m] = self._multiplier(m)
        return multiplier

    def _multiplier(self, m: int) -> Multiplier:
        """Return what multiplies m rows: csrc's operator, a program of csrc's step library, or `_direct`.

        It holds the codes and not this, so that both end with their weight.
        """
        recipe, w, given, dtype = self._recipe, self._w, self._given, self._dtype
        x_as, w_as, general = recipe.fprop_input, recipe.fprop_weight, partial(_general, given)
        if not m or given.x_held is not None:
            return general
        number = one_call.number(recipe.contract, x_as, w_as, w, dtype, m)
        if number is not None:
            router.told(gemm_request(recipe.contract, x_as, w_as, w, dtype, m), one_call.NAME)
            return one_call.multiplier(number, w_as.format, w, dtype, general)
        direct = cache(partial(_direct, recipe, given, dtype, m))
        # more rows, as prompts have, seldom come again, and their kernels take longer than Python
        few = m <= _MOST_ROWS and w.codes.get_device() >= repeat.FIRST_DEVICE
        if x_as is None or not few or native_step.why_not() is not None:
            return direct()

        def repeated(x: Tensor, bias: Tensor | None) -> Tensor:
            y = replay.packed_product(x, w, bias, recipe.key, general)
            return direct()(x, bias) if y is None else y

        return repeated


def _general(given: Given, x: Tensor, bias: Tensor | None) -> Tensor:
    y, _ = multiply(x, None, bias, given)
    return y


def _direct(recipe: LinearRecipe, given: Given, dtype: torch.dtype, m: int) -> Multiplier:
    """Return the backend's product, with W bound to it, or else the general forward."""
    w, x_as, ask = given.packed, recipe.fprop_input, Ask(False, dtype)
    assert w is not None
    k, general = w.k, partial(_general, given)
    request = gemm_request(recipe.contract, x_as, recipe.fprop_weight, w, dtype, m)
    bind = router.route(request).bind
    if bind is None or (product := bind(request, w)) is None:
        return general

    def weights(x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 2:
            return product(x, None, bias)
        return product(x.reshape(m, k), None, bias).view(*x.shape[:-1], -1)

    def operands(x: Tensor, bias: Tensor | None) -> Tensor:
        assert x_as is not None
        made = codec.quantize(x_as, x.reshape(m, k), ask)
        return product(made.matrix, made.alpha, bias).view(*x.shape[:-1], -1)

    def codes(x: Tensor, bias: Tensor | None) -> Tensor:
        assert x_as is not None
        made = codec.encode(x_as, x.reshape(m, k))
        return product(made.codes, made.scale, bias).view(*x.shape[:-1], -1)

    if x_as is None:
        return weights
    read = reads(recipe.contract)
    if read == "codes":
        made = x_as.planned(torch.empty(1, k, dtype=dtype, device="meta"))
        if made.zero is not None or made.outer is not None:  # a product has no place for them
            return general
    return {"operand": operands, "codes": codes}.get(read, general)
