"""compressed-tensors folders as packed tensors: a published W4A16, fp8 or FP4 model, ready to run, convert further or
train.

The way back of `compressed.py`, scheme by scheme. Nothing is decoded: stored codes become a PackedTensor's codes.
Parameters are on meta until they are read, one tensor at a time, so that memory holds the packed model and no float
copy of it. Weight-only layers get the contract "dequantize", which is what transformers and Marlin compute; layers with
activations get the engine's quantiser (int8-row-vllm, ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils import is_match
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from aoquant.formats import FLOAT_DTYPES, Encoded, Format, Operand, get_format, layout
from aoquant.integrations import checkpoint
from aoquant.integrations.safetensors_file import StoredTensor, header
from aoquant.layers.linear import LinearRecipe
from aoquant.planning.progress import bar
from aoquant.tensor import PackedTensor

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


def load(
    folder: Path, model_class: Any, *, dtype: torch.dtype | str = "auto", device_map: Any = None
) -> PreTrainedModel:
    """The model of a compressed-tensors folder, its quantised layers packed.

    dtype: of what stays float and of the layers' outputs; "auto" is config.json's. device_map: one device, or None for
        the CPU.

    Raises:
        ValueError: a scheme that no format of ours equals, files that do not fit the model, or another device_map.
    """
    from accelerate import init_empty_weights

    if isinstance(device_map, Mapping) or device_map in ("auto", "balanced", "sequential"):
        raise ValueError(
            f"{folder}: a compressed-tensors checkpoint is loaded onto one device, got device_map={device_map!r}"
        )
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    schemes = QuantizationConfig.model_validate(checkpoint.read_json(folder / "config.json")["quantization_config"])
    del config.quantization_config
    dtype = config.dtype if dtype == "auto" else dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.bfloat16
    with init_empty_weights(include_buffers=False):
        make = getattr(model_class, "from_config", None) or model_class._from_config
        model: PreTrainedModel = make(config, dtype=dtype).eval()
    stored_tensors: dict[str, StoredTensor] = {}
    for path in checkpoint.files(folder):
        stored_tensors |= header(path)[1]
    _fill(folder, model, stored_tensors, schemes, dtype)
    model.tie_weights()
    if left := [n for n, p in model.named_parameters() if p.is_meta]:
        raise ValueError(
            f"{folder}: does not hold {checkpoint.some(left)} of {type(model).__name__}: load it with transformers"
        )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model if device_map is None else model.to(device_map)


def _fill(
    folder: Path,
    model: PreTrainedModel,
    stored_tensors: dict[str, StoredTensor],
    schemes: QuantizationConfig,
    dtype: torch.dtype,
) -> None:
    names = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    read: set[str] = set()
    with bar(sum(stored_tensor.size for stored_tensor in stored_tensors.values()), "load") as advance:
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or f"{name}.weight_scale" not in stored_tensors:
                continue
            parts = {
                part: stored_tensors[f"{name}.{part}"]
                for part in (*_PARTS, *_INPUTS)
                if f"{name}.{part}" in stored_tensors
            }
            scheme = next((s for s in schemes.config_groups.values() if is_match(name, module, s.targets)), None)
            if not isinstance(scheme, QuantizationScheme):
                raise ValueError(f"{folder}: {name} has scales and no config group of config.json names it")
            packed = _packed(
                f"{folder}: {name}",
                scheme,
                {part: stored_tensor.read() for part, stored_tensor in parts.items()},
                dtype,
            )
            if packed.shape != module.weight.shape:
                raise ValueError(
                    f"{folder}: {name} is {tuple(packed.shape)}, and the model wants {tuple(module.weight.shape)}"
                )
            module.weight = nn.Parameter(packed, requires_grad=False)
            read |= {f"{name}.{part}" for part in parts}
            advance(sum(stored_tensor.size for stored_tensor in parts.values()), name)
        for name in sorted(stored_tensors.keys() - read):
            if name not in names or names[name].shape != stored_tensors[name].shape:
                raise ValueError(
                    f"{folder}: {name} {stored_tensors[name].shape} has no place in {type(model).__name__}: load it with transformers"
                )
            values = stored_tensors[name].read()
            values = values.to(dtype) if values.dtype in FLOAT_DTYPES else values
            owner, _, own = name.rpartition(".")
            module = model.get_submodule(owner)
            if own in module._parameters:
                setattr(module, own, nn.Parameter(values, requires_grad=names[name].requires_grad))
            else:
                setattr(module, own, values)
            advance(stored_tensors[name].size, name)


def _packed(label: str, scheme: QuantizationScheme, parts: dict[str, Tensor], dtype: torch.dtype) -> PackedTensor:
    """One layer's weight. parts: stored tensors, by the name that follows the module's."""
    args = scheme.weights
    try:
        if args is None or "weight_g_idx" in parts:
            raise ValueError("its columns are reordered (weight_g_idx)" if args else "its weights have no scheme")
        activation = _activation(scheme.input_activations, parts)
        found = _encoded(args, parts, dtype)
        recipe = LinearRecipe(activation, found.format, "aoquant" if activation else "dequantize")
    except ValueError as error:
        raise ValueError(f"{label}: aoquant has no format for this layer: {error}. Load it with transformers") from None
    return PackedTensor.from_encoded(found.encoded, recipe, dtype)


class _Found:
    """A format, and a weight in it."""

    def __init__(self, name: str, encoded: Encoded) -> None:
        self.format: Format | Operand = get_format(name)
        self.encoded = encoded


def _encoded(args: QuantizationArgs, parts: dict[str, Tensor], dtype: torch.dtype) -> _Found:
    scale = parts["weight_scale"]
    if args.type == "int":
        return _integers(args, parts, scale, dtype)
    codes = parts.get("weight_packed", parts.get("weight"))
    assert codes is not None
    k = codes.shape[1] * (8 // args.num_bits)
    if (args.num_bits, args.group_size) == (4, 16):
        outer = parts["weight_global_scale"].float().reciprocal().reshape(1, 1)
        return _Found("nvfp4", Encoded(codes, scale, None, outer, k))
    if args.group_size == 32 and scale.dtype == torch.uint8:
        exponents = scale.view(torch.float8_e8m0fnu)
        return _Found("mxfp4-even" if args.num_bits == 4 else "mxfp8", Encoded(codes, exponents, None, None, k))
    if args.num_bits == 8 and codes.dtype == torch.float8_e4m3fn:
        if args.strategy == "block":
            rows, cols = args.block_structure or (0, 0)
            return _Found(f"fp8-{rows}x{cols}", Encoded(codes, scale.float(), None, None, k))
        if args.strategy in ("channel", "tensor"):
            row = args.strategy == "channel"
            return _Found(
                "fp8-row" if row else "fp8-tensor", Encoded(codes, scale.float().reshape(-1, 1), None, None, k)
            )
    raise ValueError(f"{args.num_bits}-bit floats, strategy {args.strategy}, groups of {args.group_size}")


def _integers(args: QuantizationArgs, parts: dict[str, Tensor], scale: Tensor, dtype: torch.dtype) -> _Found:
    bits = args.num_bits
    if args.strategy not in ("group", "channel") or not 1 <= bits <= 8:
        raise ValueError(f"{bits}-bit integers, strategy {args.strategy}")
    if "weight_packed" in parts:
        shape = torch.Size(parts["weight_shape"].tolist())
        q = unpack_from_int32(parts["weight_packed"], bits, shape)
    else:
        q, shape = parts["weight"], parts["weight"].shape
    zero = parts.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:
        zero = unpack_from_int32(zero, bits, torch.Size((shape[0], scale.shape[1])), packed_dim=0)
    per = f"g{args.group_size}" if args.strategy == "group" else "row"
    if scale.dtype != torch.float32:  # as transformers loads them: into parameters of the model's dtype
        if not torch.equal(scale.to(dtype).float(), scale.float()):
            raise ValueError(f"its {scale.dtype} scales are no {dtype} numbers: load it with dtype='auto'")
        scale = scale.to(dtype)
    wide = scale.dtype == torch.float32 and bits == 8 and per == "row" and zero is None
    name = f"{'int' if wide else 'intx'}{bits}-{per}" + ("-asym" if zero is not None else "")
    codes = q if bits == 8 else layout.pack((q.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8), bits)
    return _Found(name, Encoded(codes.contiguous(), scale, None if zero is None else zero.contiguous(), None, shape[1]))


def _activation(args: QuantizationArgs | None, parts: dict[str, Tensor]) -> Format | Operand | None:
    """The engine's quantiser of the layer's input."""
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
