"""FP-Quant's pre-quantised folders as packed layers, and those with master weights as prepared ones.

A layer of `FPQuantLinear` is stored as

    qweight                  uint8 (N, K / 2), two e2m1 codes a byte, even k in the low nibble
    scales                   uint8 (N, K / block), the bits of e8m0 (mxfp4) or e4m3 (nvfp4), row after row: kernels
                             swizzle them in each call. qutlass pads N to a multiple of 128
    weight_global_scale, act_global_scale    G, (1,): a value is code * scale / G. mxfp4: 3 (abs_max) or 1 (quest)
    forward_hadamard_matrix  (S, S), T of x T and W T. Rows may have random signs, columns another order ("gsr")

with `weight` in place of the first two under store_master_weights, or `dqweight` under pseudoquantization, whose codes
are not stored. Source: github.com/IST-DASLab/FP-Quant, `inference_lib` and `model_quant.py`; transformers 5.24
`integrations/fp_quant.py`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from aoquant._messages import naming
from aoquant.config import QATConfig
from aoquant.export.filling import Filling
from aoquant.formats import Encoded, layout
from aoquant.formats.dialects import MXFP4Dialect, NVFP4Dialect
from aoquant.integrations.fp_quant import from_fp_quant
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor
from aoquant.transforms import Hadamard
from aoquant.transforms.transform import SIZES

_WEIGHTS = ("weight", "qweight", "dqweight")
_BESIDE = ("weight_global_scale", "act_global_scale", "forward_hadamard_matrix")
_PARTS = (*_WEIGHTS, "scales", *_BESIDE, "backward_hadamard_matrix")


def fill(filling: Filling) -> dict[str, QATConfig]:
    """Pack the layers of an FP-Quant folder, with the stored codes and scales. Where store_master_weights is set,
    return the configs to prepare layers with, as `from_fp_quant` does.

    Raises:
        ValueError: a layer without codes, a transform or a scale that no format of aoquant has, or files that do not
            fit the model. Says which layer.
    """
    told = filling.quantization
    master = told.get("store_master_weights", False)
    # gradients through packed codes are never rounded, whatever the layer was trained with
    config, _ = from_fp_quant(told) if master else from_fp_quant(told, backward_dtype="bf16")
    base: Any = config.base_config if isinstance(config, QATConfig) else config
    plain: LinearRecipe = replace(base, transform=None).recipe()
    skipped, configs = told.get("modules_to_not_convert") or ["lm_head"], dict[str, QATConfig]()
    for name, module in filling.model.named_modules():
        if not isinstance(module, nn.Linear) or name.endswith(tuple(skipped)):
            continue
        parts = _parts(filling, name, "weight" if master else "qweight")
        with naming(f"{filling.folder}: {name}"):
            transform, order = _transform(parts["forward_hadamard_matrix"], plain.fprop_weight.block or 1)
            if master:
                configs[name] = replace(config, base_config=replace(base, transform=transform))
                continue
            recipe, encoded = _encoded(plain, transform, order, parts, *module.weight.shape)
        filling.put(f"{name}.weight", PackedTensor.from_encoded(encoded, recipe, filling.dtype))
    return configs


def _parts(filling: Filling, name: str, wanted: str) -> dict[str, Tensor]:
    """Read a layer's parts; a float weight stays to be read with the rest."""
    own = [part for part in _PARTS if f"{name}.{part}" in filling.stored]
    for part in own:
        if filling.stored[f"{name}.{part}"].shape == (0,):  # transformers' place holder
            del filling.stored[f"{name}.{part}"]
    own = [part for part in own if f"{name}.{part}" in filling.stored]
    needed = (*_BESIDE, wanted) if wanted == "weight" else (*_BESIDE, wanted, "scales")
    if lost := [part for part in needed if part not in own]:
        held = [part for part in _WEIGHTS if part in own and part != wanted]
        why = {
            "dqweight": "decoded values, of which pseudoquantization=True stores no codes",
            "qweight": "codes, and config.json says store_master_weights=True",
            "weight": "float values, and config.json neither keeps master weights nor leaves the layer out",
        }
        raise ValueError(
            f"{filling.folder}: {name}: has no {' and no '.join(lost)}"
            + (f". It holds {held[0]}: {why[held[0]]}" if held else "")
            + ". Copy the checkpoint again, or quantise the float model (aoquant.integrations.fp_quant)"
        )
    read = [f"{name}.{part}" for part in own if part != "weight"]
    return {key.removeprefix(f"{name}."): tensor for key, tensor in filling.take(read).items()}


def _transform(matrix: Tensor, block: int) -> tuple[Hadamard | None, Tensor | None]:
    """Return the transform x T of a stored T, and the order of its columns where they are another one's than T's."""
    size, t = matrix.shape[0], matrix.bfloat16().float()
    if t.shape == (size, size) and size in SIZES:
        eye, place = torch.eye(size, device=t.device), torch.arange(size, device=t.device)
        if torch.equal(t, eye):
            return None, None
        transform = Hadamard(size, sum(1 << i for i in range(size) if t[i, 0] < 0))
        own = transform.apply(eye, inverse=False)
        order = (t.T @ own).argmax(1)
        if torch.equal(own[:, order], t) and torch.equal(order // block, place // block):
            return transform, None if torch.equal(order, place) else order
    raise ValueError(
        f"its forward_hadamard_matrix {tuple(matrix.shape)} is neither the identity nor a Hadamard matrix of {SIZES} values "
        f"whose columns stay within blocks of {block}: load it with transformers and fp_quant"
    )


def _encoded(
    plain: LinearRecipe, transform: Hadamard | None, order: Tensor | None, parts: dict[str, Tensor], n: int, k: int
) -> tuple[LinearRecipe, Encoded]:
    """Return the recipe of a layer and its weight. plain: the recipe without transform and without constant scales."""
    assert plain.fprop_input is not None
    activation, format = plain.fprop_input.format, plain.fprop_weight.format
    assert isinstance(format, MXFP4Dialect | NVFP4Dialect)
    codes, scales, block = parts["qweight"], parts["scales"], format.block or 1
    padded = -(-n // 128) * 128
    fits = codes.shape == (n, k // 2) and scales.shape in ((n, k // block), (padded, k // block))
    if not fits or {codes.dtype, scales.dtype} != {torch.uint8}:
        raise ValueError(
            f"qweight is uint8 {(n, k // 2)} and scales uint8 {(n, k // block)} or {(padded, k // block)}, got "
            f"{codes.dtype} {tuple(codes.shape)} and {scales.dtype} {tuple(scales.shape)}: copy the checkpoint again"
        )
    scale = scales[:n].contiguous().view(format.block_scale)
    if bool(scale.float().isnan().any()):
        raise ValueError("a block's scale is NaN: copy the checkpoint again")
    weight_scale, input_scale = (parts[f"{of}_global_scale"].double().flatten() for of in ("weight", "act"))
    outer = None
    if isinstance(format, NVFP4Dialect):
        for of, given in (("weight", weight_scale), ("act", input_scale)):
            if given.numel() != 1 or not 0 < given.item() < float("inf"):
                raise ValueError(
                    f"{of}_global_scale is one positive number, got {given.tolist()}: copy the checkpoint again"
                )
        outer = (1 / weight_scale).float().reshape(1, 1)
        activation = activation.fix((1 / input_scale).float().item())
    elif {*weight_scale.tolist(), *input_scale.tolist()} != {float(format.gain)}:
        raise ValueError(
            f"{format.name} has a weight_global_scale and an act_global_scale of {format.gain}, got {weight_scale.tolist()} and "
            f"{input_scale.tolist()}: load it with transformers and fp_quant"
        )
    if order is not None:
        assert transform is not None
        values = layout.unpack(codes, 4, k).view(n, -1, transform.size)[..., order.argsort()]
        codes = layout.pack(values.reshape(n, k), 4)
    return LinearRecipe(activation, format, transform=transform), Encoded(codes, scale, None, outer, k)
