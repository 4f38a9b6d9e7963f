"""The packed tensor: one subclass for every format.

The weight of a converted layer holds the codes and scales that the prepared layer multiplied and knows, by three
strings, what to do with them: the weight's format, the activation's format and the GEMM contract. So `F.linear(x,
packed)` gives the same bits, also in engines that keep nothing but weight tensors. Field names are those that HF's
loader knows; the outer scale is (N, 1), because loaders copy fused q/k/v shards row by row (linear/packed_moves.py).
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torchao.utils import TorchAOBaseTensor

from aoquant import ops
from aoquant.formats import FLOAT_DTYPES, Encoded, Format, Operand, Scales, get_operand
from aoquant.linear.bound import BoundWeight
from aoquant.linear.checks import check_device, check_dtype
from aoquant.linear.embedding import looked_up
from aoquant.linear.function import quantized_linear
from aoquant.linear.packed_parts import check_parts
from aoquant.linear.recipe import LinearRecipe

aten = torch.ops.aten
_CUTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.tensor_split.sections)  # what shards a parameter
P = TypeVar("P", bound="PackedTensor")
_BOUND, _FLAT = "_bound", "_flattened"  # what a tensor remembers of itself: made when asked for, never copied or stored


@torch.compiler.disable
def _bound_outside(w: "PackedTensor") -> BoundWeight:
    """`bound`, outside a compiler's graph."""
    return w.bound


class PackedTensor(TorchAOBaseTensor):
    """A quantised (N, K) weight.

    qdata: packed codes (N, bytes). scale, zero_point: (N, G), (N, 1) or (1, 1), or None. per_tensor_scale: (N, 1)
    float32 outer scale, or None. act_pre_scale: (K / size, size, size) bf16, the T of a fitted transform of the
    activations, or None.
    format, activation, contract: names; activation "" is high precision. k: K. dtype: what the weight was. checked: the
        parts are of a tensor that was checked.

    Raises:
        ValueError: a name is unknown, or a part does not fit the format, N and K.
    """

    tensor_data_names = ["qdata"]
    tensor_attribute_names = ["format", "activation", "contract", "k", "dtype"]
    optional_tensor_data_names = ["scale", "zero_point", "per_tensor_scale", "act_pre_scale"]

    qdata: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    per_tensor_scale: Tensor | None
    act_pre_scale: Tensor | None
    format: str
    activation: str
    contract: str
    k: int

    def __new__(
        cls,
        qdata: Tensor,
        format: str = "",
        activation: str = "",
        contract: str = "",
        k: int = 0,
        dtype: torch.dtype = torch.float32,
        *parts: Any,
        **named: Any,
    ) -> "PackedTensor":
        if isinstance(qdata, PackedTensor):  # so accelerate's offload makes a parameter of one that it moved
            return qdata.detach()
        shape = (qdata.shape[0], k)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=qdata.device, requires_grad=False)

    def __init__(
        self,
        qdata: Tensor,
        format: str = "",
        activation: str = "",
        contract: str = "",
        k: int = 0,
        dtype: torch.dtype = torch.float32,
        scale: Tensor | None = None,
        zero_point: Tensor | None = None,
        per_tensor_scale: Tensor | None = None,
        act_pre_scale: Tensor | None = None,
        *,
        requires_grad: bool = False,
        checked: bool = False,
    ) -> None:
        if isinstance(qdata, PackedTensor):
            return
        super().__init__()
        self.qdata, self.scale, self.zero_point, self.per_tensor_scale = qdata, scale, zero_point, per_tensor_scale
        self.act_pre_scale = act_pre_scale
        self.format, self.activation, self.contract, self.k = format, activation, contract, k
        if not checked:
            check_parts(f"{type(self).__name__} ({format})", self, self.recipe)

    def __setattr__(self, name: str, value: Any) -> None:
        """Setting a part or an attribute makes the tensor forget what it remembers of itself, and layers what they hold
        of it. `swap_tensors` sets `__class__` and `__dict__`.
        """
        if name == "data" and not isinstance(value, PackedTensor):
            raise ValueError(
                f"the data of a PackedTensor ({self.format}) can be replaced by another one's alone, got {type(value).__name__}: for float "
                "values, assign a new parameter to the layer"
            )
        if name.startswith("_") and name not in ("__class__", "__dict__"):  # a note of Dynamo's, for one
            super().__setattr__(name, value)
            return
        bound: BoundWeight | None = self.__dict__.pop(_BOUND, None)
        self.__dict__.pop(_FLAT, None)
        super().__setattr__(name, value)
        if name == "data":  # torch took its shape, dtype and device
            self.__dict__.update({n: v for n, v in value.__dict__.items() if not n.startswith("_")})
        if bound is not None:
            bound.end()

    def __getstate__(self) -> dict[str, Any]:
        """The attributes to copy and store."""
        return {name: value for name, value in self.__dict__.items() if name not in (_BOUND, _FLAT)}

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """torchao's, made once: a compiled step asks each weight for it several times."""
        found: tuple[list[str], dict[str, Any]] | None = self.__dict__.get(_FLAT)
        if found is None:
            found = self.__dict__[_FLAT] = super().__tensor_flatten__()
        return found

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Any], attributes: dict[str, Any], size: Any, stride: Any
    ) -> "PackedTensor":
        return cls(**parts, **attributes, checked=True)

    @property
    def bound(self) -> BoundWeight:
        """Return how a call without gradients multiplies by this weight."""
        if torch.compiler.is_dynamo_compiling():  # one expert, w[e], in a loop: Dynamo cannot read its __dict__
            return _bound_outside(self)
        found: BoundWeight | None = self.__dict__.get(_BOUND)
        if found is None:
            found = self.__dict__[_BOUND] = BoundWeight(self.encoded, self.recipe, self.dtype, self.act_pre_scale)
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """F.linear without gradients first: serving calls little else, and torchao's tables would double its cost."""
        if func is F.linear and not (torch.compiler.is_compiling() or torch.is_grad_enabled()) and not kwargs:
            w, bias = args[1], args[2] if len(args) == 3 else None
            if type(w) is PackedTensor and (y := w.bound.product(args[0], bias)) is not None:
                return y
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        table: Any = cls._ATEN_OP_TABLE.get(cls, {})
        if func not in table:
            w = next((a for a in args if isinstance(a, PackedTensor)), None)
            if w is not None and w.dim() == 3:
                raise NotImplementedError(
                    f"packed experts {tuple(w.shape)} ({w.format}): {func} of them is not supported. Under torch.compile this is their loop, "
                    "which is not compiled: run the model eagerly, call model.set_experts_implementation('eager'), or compile "
                    "around the experts, with torch.compiler.disable on their module"
                )
            if w is not None and func in _CUTS:
                raise ValueError(
                    f"a quantised weight {tuple(w.shape)} ({w.format}) is not sharded (fully_shard, parallelize_module): shard the prepared model "
                    "and convert it then, or leave the converted layers out (fully_shard's ignored_params)"
                )
            what = "a quantised weight" if w is None else f"a quantised weight {tuple(w.shape)} ({w.format})"
            raise NotImplementedError(
                f"{func} of {what}: only F.linear and F.embedding take codes. If a model reads a layer's weight directly, leave that layer "
                "out of quantize_ (filter_fn, or None for its name in FqnToConfig); for the values, call weight.dequantize()"
            )
        return table[func](func, types, args, kwargs or {})

    @classmethod
    def from_encoded(
        cls, e: Encoded, recipe: LinearRecipe, dtype: torch.dtype, matrix: Tensor | None = None
    ) -> "PackedTensor":
        """Pack what `recipe.fprop_weight.encode` returned for a weight of `dtype`. matrix: T of a fitted transform."""
        names = (recipe.fprop_weight.narrow.name, recipe.input_name, recipe.contract)
        matrix = None if matrix is None else matrix.to(e.codes.device, torch.bfloat16)  # bf16 numbers already
        return cls(e.codes, *names, e.k, dtype, e.scale, e.zero, e.by_row.outer, matrix)

    @property
    def encoded(self) -> Encoded:
        return Encoded(self.qdata, self.scale, self.zero_point, self.per_tensor_scale, self.k)

    @property
    def weight_format(self) -> Format | Operand:
        """Return the format, or the operand with its transform, that `format` names."""
        operand = self.recipe.fprop_weight
        return operand.format if operand.transform is None else operand

    @property
    def recipe(self) -> LinearRecipe:
        """Return the recipe that the three strings name: made once for all weights that have them."""
        return recipe_named(self.format, self.activation, self.contract)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the (N, K) values that the layer multiplies its input by, W' T behind a transform.

        dtype: of the values; by default the weight's own.
        """
        return self.recipe.weight_values(self.encoded, dtype or self.dtype, self.act_pre_scale)

    def __repr__(self) -> str:
        return f"PackedTensor({self._quantization_type()}, device={self.device})"

    def _quantization_type(self) -> str:
        return f"shape={tuple(self.shape)}, dtype={self.dtype}, {self.recipe}"

    def _stable_hash_for_caching(self) -> str:
        """The key of torch's compile cache: everything that compiled code depends on, so all but the numbers."""
        inner = [t if t is None else (t.dtype, tuple(t.shape), t.stride(), str(t.device)) for t in parts_of(self)]
        return repr(
            (ops.schemas(), self.format, self.activation, self.contract, self.k, self.dtype, self.requires_grad, inner)
        )

    def _with(
        self, tensors: list[Tensor | None], k: int | None = None, dtype: torch.dtype | None = None
    ) -> "PackedTensor":
        """A tensor like this one with other parts, in the order of `parts_of`."""
        return self._like(PackedTensor, tensors, k, dtype)

    def _as_it_is(self) -> AbstractContextManager[object]:
        """Leave inference_mode for a view of an ordinary tensor, which torch wants ordinary in subclasses."""
        view = torch.is_inference_mode_enabled() and not self.is_inference()
        return torch.inference_mode(False) if view else nullcontext()

    def _like(
        self, cls: type[P], tensors: list[Tensor | None], k: int | None, dtype: torch.dtype | None, **more: Any
    ) -> P:
        """A `cls` with this one's names, and its k and dtype unless others are given. more: attributes of `cls`."""
        qdata, *parts = tensors
        assert qdata is not None
        names = self.format, self.activation, self.contract
        named: Any = more | dict(zip(PackedTensor.optional_tensor_data_names, parts, strict=True))
        with self._as_it_is():
            return cls(qdata, *names, self.k if k is None else k, dtype or self.dtype, checked=True, **named)


@torch.compiler.assume_constant_result
def recipe_named(format: str, activation: str, contract: str) -> LinearRecipe:
    """The recipe of a packed layer; activation "" is high precision."""
    return _recipe(format, activation, contract)


@cache
def _recipe(format: str, activation: str, contract: str) -> LinearRecipe:
    return LinearRecipe(get_operand(activation) if activation else None, get_operand(format), contract)


def parts_of(packed: PackedTensor) -> list[Tensor | None]:
    return [packed.qdata, packed.scale, packed.zero_point, packed.per_tensor_scale, packed.act_pre_scale]


@PackedTensor.implements([aten.linear.default])
@PackedTensor.implements_torch_function([F.linear])
def _linear(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    def bound(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        return input, weight, bias

    x, w, bias = bound(*args, **(kwargs or {}))
    if not isinstance(w, PackedTensor) or isinstance(x, PackedTensor):
        raise ValueError(
            "only the weight of a linear layer can be a PackedTensor: call dequantize() on the other operand"
        )
    if x.dtype in FLOAT_DTYPES:  # others are refused below
        check_dtype(x, w.dtype, w.contract)
    held = None if w.act_pre_scale is None else Scales(transform=w.act_pre_scale)
    return quantized_linear(x, w.encoded, bias, w.recipe, held)


@PackedTensor.implements_torch_function([F.embedding])
def _embedding(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    """Rows of the weight. padding_idx, sparse and scale_grad_by_freq concern gradients, which codes do not have."""

    def bound(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        *rest: Any,
        **named: Any,
    ) -> tuple[Tensor, Tensor, float | None]:
        return input, weight, max_norm

    ids, w, max_norm = bound(*args, **(kwargs or {}))
    if not isinstance(w, PackedTensor) or max_norm is not None:
        raise ValueError(
            "an embedding's packed weight is looked up by integer indices, and cannot be renormalised: use max_norm=None"
        )
    if w.recipe.transform is not None:
        raise ValueError(
            f"an embedding's rows cannot be read behind a transform, got {w.format}: dequantize() the weight"
        )
    check_device(ids, w)
    return looked_up(ids, w.encoded, w.format, w.dtype)


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two quantised tensors, ours or torchao's, are of one kind and hold the same codes and scales."""
    if type(a) is not type(b) or a.shape != b.shape or a.__tensor_flatten__() != b.__tensor_flatten__():
        return False
    pairs = [(getattr(a, name).detach(), getattr(b, name).detach()) for name in a.__tensor_flatten__()[0]]
    return all(
        (x.shape, x.dtype) == (y.shape, y.dtype)
        and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
        for x, y in pairs
    )


# under its first name too, which checkpoints of 2026 have
torch.serialization.add_safe_globals([PackedTensor, (PackedTensor, "aoquant.tensor.PackedTensor")])
