"""compressed-tensors folders as packed tensors: a published W4A16, fp8 or FP4 model, ready to run, convert further or
train.

The way back of `compressed.py`, scheme by scheme. Nothing is decoded: stored codes become a PackedTensor's codes.
Parameters are on meta until they are read, one tensor at a time, so that memory holds the packed model and no float
copy of it. Experts are stored as linear layers, one after another ("...experts.0.gate_proj"), as Kimi K2 publishes
them, and become packed stacks. Weight-only layers get the contract "dequantize", which is what transformers and Marlin
compute; layers with activations get the engine's quantiser (int8-row-vllm, ...).
"""

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils import is_match
from torch import Tensor, nn

from aoquant._messages import naming, warn
from aoquant.experts.packed_experts import packed_experts
from aoquant.export.filling import Filling
from aoquant.export.kv_cache import attach_scheme
from aoquant.files.stored_names import Piece
from aoquant.formats import Encoded, Format, Operand, get_format, layout
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor

_PARTS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_global_scale",
    "weight_shape",
    "weight_g_idx",
)
_INPUTS = ("input_scale", "input_global_scale", "input_zero_point")
_CACHES = tuple(f".{of}_{part}" for of in ("k", "v", "q") for part in ("scale", "zero_point"))
# fields of config.json that make the stored weights mean something else, unless they are empty
_CHANGES = ("sparsity_config", "transform_config", "moe_sparsity_config")


def fill(filling: Filling) -> None:
    """Pack the quantised layers and experts of a compressed-tensors folder.

    Raises:
        ValueError: a scheme that no format of ours equals, or files that do not fit the model.
    """
    schemes = QuantizationConfig.model_validate(filling.quantization)
    _check_patterns(filling.folder, schemes)
    _check_rest(filling, schemes)
    for name, module in filling.model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and (scale := filling.names.get(f"{name}.weight_scale")):
            own = scale.removesuffix(".weight_scale")
            filling.put(f"{name}.weight", _layer(filling, schemes, name, module, own))
    for name, pieces in filling.stacks.items():
        if pieces and f"{pieces[0].module}.weight_scale" in filling.stored:
            filling.put(name, packed_experts(_experts(filling, schemes, name, pieces)))


def _check_patterns(folder: Path, schemes: QuantizationConfig) -> None:
    """Raise ValueError for a target or an ignored name that is no regular expression behind "re:"."""
    groups = [s.targets for s in schemes.config_groups.values() if isinstance(s, QuantizationScheme)]
    for pattern in (*chain.from_iterable(groups), *(schemes.ignore or ())):
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise ValueError(
                f"{folder / 'config.json'}: {pattern!r:.80} is no regular expression ({error}): do not use this checkpoint"
            ) from None


def _check_rest(filling: Filling, schemes: QuantizationConfig) -> None:
    """Raise ValueError for what config.json says of the layers beside their schemes and aoquant does not compute. A
    quantised KV cache is computed, or warned of where no format of ours is its scheme.
    """
    where, told = filling.folder / "config.json", filling.quantization
    for field in _CHANGES:
        if _does_something(told.get(field)):
            raise ValueError(
                f"{where}: aoquant does not compute its {field} ({told[field]!r:.80}), and would read other weights: "
                "load it with transformers or vLLM"
            )
    for name, scheme in schemes.config_groups.items():
        if isinstance(scheme, QuantizationScheme) and scheme.weights is None and scheme.input_activations is not None:
            raise ValueError(
                f"{where}: config group {name} quantises the inputs of {scheme.targets} and no weights, which aoquant does "
                "not compute: load it with transformers or vLLM"
            )
    if schemes.kv_cache_scheme is not None:
        scales = filling.take([name for name in filling.stored if name.endswith(_CACHES)])
        reason = attach_scheme(filling.model, schemes.kv_cache_scheme, scales)
        if reason is not None:
            warn(f"{where}: its kv_cache_scheme is not computed ({reason}): the cache of keys and values stays float")


def _does_something(field: Any) -> bool:
    """Return whether a field of `_CHANGES` says more than its empty forms: null, {}, empty values, the format dense."""
    if not isinstance(field, dict):
        return bool(field)
    return field.get("format") != "dense" and any(field.values())


def _experts(filling: Filling, schemes: QuantizationConfig, name: str, pieces: list[Piece]) -> list[PackedTensor]:
    like = nn.Linear(1, 1, device="meta")  # config groups target classes, and an expert would be this one
    made: list[list[PackedTensor]] = []
    for piece in pieces:
        if piece.expert == len(made):
            made.append([])
        if f"{piece.module}.weight_scale" not in filling.stored:
            raise ValueError(
                f"{filling.folder}: {piece.module} has no scales, and {pieces[0].module} has: copy it again"
            )
        made[piece.expert].append(_layer(filling, schemes, piece.module, like))
    with naming(f"{filling.folder}: {name}", ". Load it with transformers"):
        return [joined_rows(parts) for parts in made]


def _layer(
    filling: Filling, schemes: QuantizationConfig, name: str, module: nn.Module, stored: str = ""
) -> PackedTensor:
    """The packed weight of a linear layer. name: in the model, of an expert's matrix in files; stored: in files, where
    it has another one. Config groups may have either.
    """
    own = [part for part in (*_PARTS, *_INPUTS) if f"{name}.{part}" in filling.stored]
    stored = stored or name
    names = {stored, name}
    scheme = next(
        (s for s in schemes.config_groups.values() if any(is_match(n, module, s.targets) for n in names)), None
    )
    if not isinstance(scheme, QuantizationScheme):
        raise ValueError(f"{filling.folder}: {stored} has scales and no config group of config.json names it")
    tensors = filling.take(f"{name}.{part}" for part in own)
    parts = {part: tensors[f"{name}.{part}"] for part in own}
    return _packed(f"{filling.folder}: {stored}", scheme, parts, filling.dtype)


def _packed(label: str, scheme: QuantizationScheme, parts: dict[str, Tensor], dtype: torch.dtype) -> PackedTensor:
    """Return one layer's weight. parts: stored tensors, by the name that follows the module's."""
    args = scheme.weights
    with naming(f"{label}: aoquant has no format for this layer", ". Load it with transformers"):
        if args is None or "weight_g_idx" in parts:
            raise ValueError("its columns are reordered (weight_g_idx)" if args else "its weights have no scheme")
        if scheme.output_activations is not None:
            raise ValueError("its outputs are quantised (output_activations)")
        activation = _activation(scheme.input_activations, parts)
        format, encoded = _encoded(args, parts, dtype)
        recipe = LinearRecipe(activation, get_format(format), "aoquant" if activation else "dequantize")
    return PackedTensor.from_encoded(encoded, recipe, dtype)


def _encoded(args: QuantizationArgs, parts: dict[str, Tensor], dtype: torch.dtype) -> tuple[str, Encoded]:
    """Return the name of a format, and a weight in it."""
    scale = parts["weight_scale"]
    if args.type == "int":
        return _integers(args, parts, scale, dtype)
    codes = parts.get("weight_packed", parts.get("weight"))
    assert codes is not None
    k = codes.shape[1] * (8 // args.num_bits)
    if (args.num_bits, args.group_size) == (4, 16):
        outer = parts["weight_global_scale"].float().reciprocal().reshape(1, 1)
        return "nvfp4", Encoded(codes, scale, None, outer, k)
    if args.group_size == 32 and scale.dtype == torch.uint8:
        exponents = scale.view(torch.float8_e8m0fnu)
        return "mxfp4-even" if args.num_bits == 4 else "mxfp8", Encoded(codes, exponents, None, None, k)
    if args.num_bits == 8 and codes.dtype == torch.float8_e4m3fn:
        if args.strategy == "block":
            rows, cols = args.block_structure or (0, 0)
            return f"fp8-{rows}x{cols}", Encoded(codes, scale.float(), None, None, k)
        if args.strategy in ("channel", "tensor"):
            name = "fp8-row" if args.strategy == "channel" else "fp8-tensor"
            return name, Encoded(codes, scale.float().reshape(-1, 1), None, None, k)
    raise ValueError(f"{args.num_bits}-bit floats, strategy {args.strategy}, groups of {args.group_size}")


def _integers(
    args: QuantizationArgs, parts: dict[str, Tensor], scale: Tensor, dtype: torch.dtype
) -> tuple[str, Encoded]:
    bits = args.num_bits
    if args.strategy not in ("group", "channel") or not 1 <= bits <= 8:
        raise ValueError(f"{bits}-bit integers, strategy {args.strategy}")
    if "weight_packed" in parts:
        shape = torch.Size(parts["weight_shape"].tolist())
        _check_width("weight_packed", parts["weight_packed"], (shape[0], _words(shape[1], bits)), bits)
        q = unpack_from_int32(parts["weight_packed"], bits, shape)
    else:
        q, shape = parts["weight"], parts["weight"].shape
        if q.dtype != torch.int8 or (q.numel() and max(-int(q.min()) - 1, int(q.max())) >= 1 << (bits - 1)):
            raise ValueError(f"codes of more than {bits} bits: num_bits is wrong")
    zero = parts.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:
        _check_width("weight_zero_point", zero, (_words(shape[0], bits), scale.shape[1]), bits)
        words = zero.t().clone(memory_format=torch.contiguous_format)  # its strides are read, of one word a row, too
        zero = unpack_from_int32(words, bits, torch.Size((scale.shape[1], shape[0]))).t()
    per = f"g{args.group_size}" if args.strategy == "group" else "row"
    if scale.dtype != torch.float32:  # as transformers loads them: into parameters of the model's dtype
        if not torch.equal(scale.to(dtype).float(), scale.float()):
            raise ValueError(f"its {scale.dtype} scales are no {dtype} numbers: load it with dtype='auto'")
        scale = scale.to(dtype)
    wide = scale.dtype == torch.float32 and bits == 8 and per == "row" and zero is None
    name = f"{'int' if wide else 'intx'}{bits}-{per}" + ("-asym" if zero is not None else "")
    codes = q if bits == 8 else layout.pack((q.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8), bits)
    return name, Encoded(codes.contiguous(), scale, None if zero is None else zero.contiguous(), None, shape[1])


def _words(values: int, bits: int) -> int:
    """Return how many int32 the values of a row are packed into."""
    return -(-values * bits // 32)


def _check_width(part: str, packed: Tensor, wanted: tuple[int, int], bits: int) -> None:
    """Raise ValueError for packed codes of another width than the config names: they would unpack to other numbers."""
    if packed.dtype != torch.int32 or tuple(packed.shape) != wanted:
        raise ValueError(
            f"{part} of {tuple(packed.shape)}, {packed.dtype}: codes of {bits} bits would be int32 {wanted}"
        )


def _activation(args: QuantizationArgs | None, parts: dict[str, Tensor]) -> Format | Operand | None:
    if args is None:
        return None
    kind = (args.num_bits, args.type, args.strategy)
    if args.dynamic is True and args.symmetric:
        groups = {128: "fp8-1x128", 32: "mxfp8"} if args.num_bits == 8 else {32: "mxfp4-even"}
        names = {(8, "int", "token"): "int8-row-vllm", (8, "float", "token"): "fp8-row-vllm"}
        name = names.get(kind) or (groups.get(args.group_size or 0) if kind[1:] == ("float", "group") else None)
        if name:
            return get_format(name)
    if kind == (4, "float", "tensor_group") and "input_global_scale" in parts:
        return get_format("nvfp4").fix(parts["input_global_scale"].float().reciprocal().item())
    if args.strategy == "tensor" and args.num_bits == 8 and "input_scale" in parts and args.symmetric:
        return get_format(f"{'int8' if args.type == 'int' else 'fp8'}-tensor").fix(parts["input_scale"].float().item())
    raise ValueError(
        f"activations of {args.num_bits} bits ({args.type}), strategy {args.strategy}, dynamic={args.dynamic}"
    )


def joined_rows(parts: Sequence[PackedTensor]) -> PackedTensor:
    """The weight whose rows are those of `parts`, such as q, k and v, in order; codes and scales are copied.

    Raises:
        ValueError: they differ in format, activations, contract, columns or dtype, or have scales of their own for all
            of their rows.
    """
    first = parts[0]
    facts = [(p.format, p.activation, p.contract, p.k, p.dtype) for p in parts]
    if wrong := [fact for fact in facts if fact != facts[0]]:
        raise ValueError(f"rows of one weight are quantised as {facts[0]} and as {wrong[0]}")
    names = (*PackedTensor.tensor_data_names, *PackedTensor.optional_tensor_data_names)
    joined = list[Tensor | None]()
    for pieces in zip(*([getattr(p, name) for name in names] for p in parts), strict=True):
        given = [t for t in pieces if t is not None]
        if len(given) < len(pieces) or all(len(t) == len(p) for t, p in zip(given, parts, strict=True)):
            joined.append(torch.cat(given) if given else None)
        elif all(torch.equal(t, given[0]) for t in given) and len(given[0]) == 1:
            joined.append(given[0])
        elif first.weight_format.tile_rows > 1 and not any(len(p) % first.weight_format.tile_rows for p in parts):
            joined.append(torch.cat(given))
        else:
            raise ValueError(f"rows of one weight have a scale ({first.format}) for each of {len(parts)} parts")
    return first._with(joined)
