"""What PyTorch does to a packed tensor besides multiplying by it: views, copies, moves, cuts.

Nothing here rounds. Codes and scales move as they are, into a tensor of the same recipe and shape; whatever would need
other codes is refused, and says what to do in its place.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from aoquant._messages import warn
from aoquant.formats import FLOAT_DTYPES, tiles
from aoquant.linear.tensor import PackedTensor, parts_of, same_bits

aten = torch.ops.aten


@PackedTensor.implements([aten.view.default])
def _view(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedTensor:
    """Another tensor object over the same codes, as a DTensor makes one of its local tensor; never another shape."""
    packed, shape = args
    if tuple(shape) != tuple(packed.shape):
        raise ValueError(
            f"a PackedTensor of shape {tuple(packed.shape)} cannot be viewed as {tuple(shape)}: dequantize() it; "
            "DistributedDataParallel, which would broadcast it, takes packed models with init_sync=False"
        )
    return return_and_correct_aliasing(func, args, kwargs, packed._with(parts_of(packed)))


@PackedTensor.implements_torch_function([Tensor.storage])
def _storage(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """safetensors calls this when it takes a tensor for plain memory, by itself or in a model's `save_pretrained`."""
    raise ValueError(
        "a PackedTensor is several tensors, which safetensors cannot write as one: save the model with aoquant.save_pretrained(model, directory), or "
        "its state_dict with torch.save"
    )


@PackedTensor.implements_torch_function([Tensor.requires_grad_, Tensor.requires_grad.__set__])  # type: ignore[attr-defined]
def _requires_grad(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Codes get no gradient. A parameter is told so; `nn.Parameter` asks too, before its tensor is one."""

    def asked(packed: Tensor, requires_grad: bool = True) -> bool:
        return requires_grad and getattr(packed, "_is_param", False)

    if asked(*args, **(kwargs or {})):
        warn(
            f"packed codes ({args[0].format}) get no gradient, so an optimizer leaves them as they are: aoquant.unpack_(model) makes prepared "
            "layers of them, which train on from these codes"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


@PackedTensor.implements_torch_function([Tensor.share_memory_])
def _share_memory_(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> PackedTensor:
    """Its parts move; torch would follow the null pointer of a tensor that has no storage of its own."""
    packed: PackedTensor = args[0]
    for part in parts_of(packed):
        if part is not None:
            part.share_memory_()
    return packed


@PackedTensor.implements_torch_function([Tensor.is_shared])
def _is_shared(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    return all(part is None or part.is_shared() for part in parts_of(args[0]))


@PackedTensor.implements([aten.is_pinned.default])
def _is_pinned(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0].qdata.is_pinned()


@PackedTensor.implements([aten._to_copy.default])
def _to_copy(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedTensor:
    """A new device moves codes and scales; a new dtype changes what the layer computes in, and never re-rounds them."""
    packed: PackedTensor = args[0]
    dtype = kwargs.get("dtype") or packed.dtype
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"a PackedTensor stands for float32, bfloat16 or float16 weights, not {dtype}")
    target = {"device": kwargs.get("device") or packed.device, "non_blocking": kwargs.get("non_blocking", False)}
    with packed._as_it_is():  # of a model that is moved under inference_mode, and trained or loaded into later
        moved = [None if t is None else t.to(**target, copy=True) for t in parts_of(packed)]
    return packed._with(moved, dtype=dtype)


@PackedTensor.implements([aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other])
def _to(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Under inference_mode these arrive whole."""
    return func.decompose(*args, **kwargs)


@PackedTensor.implements([aten.detach.default])
def _detach(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedTensor:
    packed: PackedTensor = args[0]
    with packed._as_it_is():
        parts = [None if t is None else t.detach() for t in parts_of(packed)]
    return return_and_correct_aliasing(func, args, kwargs, packed._with(parts))


@PackedTensor.implements([aten.copy_.default])
def _copy_(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies between packed tensors of one recipe and shape; any other copy would round, or undo a rounding."""
    to, source = args[0], args[1]
    if not isinstance(to, PackedTensor):
        raise ValueError(
            "a float weight cannot take packed codes: use load_state_dict(..., assign=True), or dequantize() them"
        )
    if not isinstance(source, PackedTensor) or _layout(source) != _layout(to):
        got = (
            source._quantization_type()
            if isinstance(source, PackedTensor)
            else f"{type(source).__name__}, {source.dtype}"
        )
        raise ValueError(
            f"packed codes ({to._quantization_type()}) can be replaced by their like only, got ({got}): load float weights into the "
            "float model and quantise it then; load other codes with load_state_dict(..., assign=True)"
        )
    mine, theirs = to.act_pre_scale, source.act_pre_scale
    if _is_cut(to) and mine is not None and theirs is not None and not torch.equal(mine, theirs):
        raise ValueError(
            f"rows of a PackedTensor with a fitted transform ({to.format}) can take rows of the same transform only, and these were fitted to "
            "another layer, as q, k and v are: load the layers apart, not fused into one weight"
        )
    for mine, theirs in zip(parts_of(to), parts_of(source), strict=True):
        if mine is not None and theirs is not None:
            mine.copy_(theirs)
    return to


def _is_cut(packed: PackedTensor) -> bool:
    """Return whether these are some rows of a larger weight, whose transform is that of all its rows."""
    codes = packed.qdata
    return packed.act_pre_scale is not None and codes.untyped_storage().nbytes() > codes.numel() * codes.element_size()


@PackedTensor.implements([aten.equal.default])
def _equal(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return same_bits(args[0], args[1])


def _layout(packed: PackedTensor) -> tuple[Any, ...]:
    """The facts that two packed tensors must share for one's bytes to mean the same in the other."""
    return packed._quantization_type(), *((t.shape, t.dtype) if t is not None else None for t in parts_of(packed))


@PackedTensor.implements([aten.empty_like.default])
def _empty_like(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedTensor:
    """The same layout, uninitialised, on another device: `to_empty` makes it of a skeleton on meta before a load."""
    packed: PackedTensor = args[0]
    device = kwargs.get("device") or packed.device
    return packed._with([None if t is None else torch.empty_like(t, device=device) for t in parts_of(packed)])


@PackedTensor.implements([aten.slice.Tensor])
def _slice(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedTensor:
    """Rows anywhere; columns at multiples of the scale block and of a byte. Views, since loaders copy into them."""
    packed: PackedTensor = args[0]
    given: list[Any] = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
    dim, start, end, step = given
    start, end, _ = slice(start, end).indices(packed.shape[dim])
    if step != 1:
        raise ValueError(f"a PackedTensor is sliced with step 1, got {step}")
    sliced = (cut_columns if dim else cut_rows)(packed, start, end)
    return return_and_correct_aliasing(func, args, kwargs, sliced)


def cut_rows(packed: PackedTensor, start: int, end: int) -> PackedTensor:
    """Rows start:end, views. Raises ValueError: they cut a tile."""
    format, n = packed.weight_format, packed.shape[0]
    unit = format.tile_rows
    if start % unit or (end % unit and end != n):
        raise ValueError(f"{format.name} weights are cut along N at multiples of {unit}, got {start}:{end}")

    cut = tiles.rows_of(format, packed.encoded, slice(start, end))
    return packed._with([*cut.tensors, packed.act_pre_scale])


def cut_columns(packed: PackedTensor, start: int, end: int) -> PackedTensor:
    """Columns start:end, views. Raises ValueError: they cut a scale block or a byte."""
    format, k = packed.weight_format, packed.k
    unit = format.period if format.block else 8
    if start % unit or (end % unit and end != k):
        raise ValueError(f"{format.name} weights are cut along K at multiples of {unit}, got {start}:{end}")

    def columns(t: Tensor) -> Tensor:
        """Cut a tensor whose width is proportional to K; one with a single column covers every k."""
        return t if t.shape[1] == 1 else t[:, start * t.shape[1] // k : end * t.shape[1] // k]

    matrix = packed.act_pre_scale
    if matrix is not None:
        matrix = matrix[start // matrix.shape[-1] : end // matrix.shape[-1]]
    return packed._with([*packed.encoded.map(columns).tensors, matrix], k=end - start)
