"""Codes, scales and zero points that do not fit their format, N and K are refused where a tensor is made."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.moe_models import model_of
from torch import Tensor, nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict
from torchao.quantization import FqnToConfig, Int4TilePackedTo4dTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import aoquant
from aoquant import PackedTensor
from aoquant.experts.packed_experts import PackedExperts, packed_experts
from aoquant.formats import get_format, list_formats

RECIPES = ["int4-g32", "nvfp4", "mxfp4", "fp8", "intx3-g32-asym", "int8-row", "gridflip", "nvfp4-4over6"]
TORCHAO = ["torchao-int8", "torchao-fp8", "torchao-intx4", "torchao-mxfp8", "torchao-nvfp4"]


def packed(format: str, n: int = 32, k: int = 256) -> PackedTensor:
    layer = nn.Linear(k, n, bias=False)
    aoquant.quantize_(layer, aoquant.PackedWeightConfig(format))
    weight = layer.weight.data
    assert isinstance(weight, PackedTensor)
    return weight


def fields(w: PackedTensor) -> dict[str, Any]:
    names = [*type(w).tensor_attribute_names, *w.tensor_data_names, *w.optional_tensor_data_names]
    return {name: getattr(w, name) for name in names}


FORMATS = [name for name in list_formats() if get_format(name).why_not(256, torch.float32) is None]


def weights(name: str) -> list[PackedTensor]:
    """The weight of a linear layer and of stacked experts, in one format; none where weights do not come in it."""
    try:
        w = packed(name)
    except ValueError:
        return []
    return [w, packed_experts([w, w])]


def test_every_part_of_every_format_is_checked() -> None:
    torch.manual_seed(0)
    seen = 0
    for format in FORMATS:
        for w in weights(format):
            good = fields(w)
            type(w)(**good)
            tensors = {name: t for name, t in good.items() if isinstance(t, Tensor)}
            seen += 1
            for name, t in tensors.items():
                other = t.to(torch.complex64) if t.element_size() > 1 else t.view(torch.bool)
                bad: list[Any] = [t.unsqueeze(0), other, None, "text"]
                if name != "qdata":  # which says what N is
                    bad.append(t[..., :1, :].repeat(*[1] * (t.dim() - 2), 3, 1))
                if t.shape[-1] > 1:
                    bad += [t[..., :-1], nn.Parameter(t[..., :-1], requires_grad=False)]
                    bad += [torch.cat([t.view(torch.uint8), t.view(torch.uint8)], -1).view(t.dtype)]
                for value in bad:
                    with pytest.raises((ValueError, AttributeError)):
                        type(w)(**{**good, name: value})
            if type(w) is PackedTensor:  # parts of a stack, which fit each other
                with pytest.raises(ValueError, match="codes"):
                    PackedTensor(**good | {name: t.unsqueeze(0) for name, t in tensors.items()})
            for name in {"scale", "zero_point", "per_tensor_scale", "act_pre_scale"} - tensors.keys():
                with pytest.raises(ValueError, match=name):
                    type(w)(**{**good, name: torch.ones(2, 2)})
            for k in (0, -256, 128, 512, 257, "256", True, 256.0):
                with pytest.raises((ValueError, TypeError, RuntimeError)):  # torch's own for a negative size
                    type(w)(**{**good, "k": k})
            for name, value in {"format": "nvfp5", "activation": "x", "contract": "x", "dtype": torch.int8}.items():
                with pytest.raises(ValueError):  # noqa: PT011
                    type(w)(**{**good, name: value})
    assert seen > 40


def test_a_weight_in_every_other_format_is_refused_or_holds_the_same_parts() -> None:
    """A wrong name in a file is an error, unless the two formats store equal shapes."""
    made = {name: found[0] for name in FORMATS if (found := weights(name))}

    def described(w: PackedTensor) -> list[Any]:
        return [
            None if t is None else (tuple(t.shape), t.dtype)
            for t in (w.qdata, w.scale, w.zero_point, w.per_tensor_scale)
        ]

    refused = 0
    for name, w in made.items():
        for other, like in made.items():
            try:
                PackedTensor(**{**fields(w), "format": other})
            except ValueError:
                refused += 1
                assert described(w) != described(like), (name, other)
    assert refused > len(made) ** 2 // 2


def test_views_and_copies_are_taken() -> None:
    for format in ("int4-g32", "fp8-128x128", "nvfp4"):
        w = packed(format, 256)
        stack = packed_experts([w, w])
        for view in (
            w[:128],
            w.detach(),
            w.clone(),
            w.to(torch.bfloat16),
            stack[1],
            stack.transpose(-1, -2),
            stack[:1],
        ):
            again = type(view)(**fields(view)) if view.dim() == w.dim() or isinstance(view, PackedExperts) else view
            assert again.shape == view.shape


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("parts")

    def made(recipe: str) -> Path:
        out = base / recipe
        if not out.exists():
            torch.manual_seed(0)
            sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
            model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False))
            config: Any = recipe
            if recipe == "embedding":
                config = FqnToConfig({"model.embed_tokens": aoquant.MXFP4WeightConfig(activation=None)})
            aoquant.quantize_(model.bfloat16(), config)
            aoquant.save_pretrained(model, out)
        return out

    return made


def edited(folder: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> list[str]:
    """Copy a checkpoint, describe its quantised tensors in another way, and return their names; it has no checksums."""
    shutil.copytree(folder, to)
    path = to / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    metadata.pop("aoquant_crc32")
    described = {name: json.loads(metadata[name]) for name in json.loads(metadata["tensor_names"])}
    quantised = [name for name, written in described.items() if written["_type"] != "Tensor"]
    for name in quantised:
        change(described[name])
        metadata[name] = json.dumps(described[name])
    save_file(load_file(path), path, metadata)
    return quantised


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "group": ("int4-g32", lambda d: d.update(format="int4-g16")),
    "format": ("int4-g32", lambda d: d.update(format="mxfp4")),
    "unknown format": ("nvfp4", lambda d: d.update(format="nvfp5")),
    "unknown activation": ("nvfp4", lambda d: d.update(activation="nvfp5")),
    "unknown contract": ("nvfp4", lambda d: d.update(contract="none")),
    "k": ("nvfp4", lambda d: d.update(k=128)),
    "embedding": ("embedding", lambda d: d.update(format="nvfp4")),
    "embedding's k": ("embedding", lambda d: d.update(k=32)),
    "torchao's block": ("torchao-fp8", lambda d: d.update(block_size=[1, 32])),
    "torchao's block of 0": ("torchao-fp8", lambda d: d.update(block_size=[1, 0])),
    "torchao's int8": ("torchao-int8", lambda d: d.update(block_size=[2, 64])),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_folder_with_a_wrong_description_is_refused_at_once(
    folders: Callable[[str], Path], case: str, tmp_path: Path
) -> None:
    recipe, change = WRONG[case]
    edited(folders(recipe), folder := tmp_path / "copy", lambda described: change(described["_data"]))
    with pytest.raises(ValueError, match=r"model\.safetensors: model\..*weight"):
        aoquant.load_pretrained(folder)
    with pytest.raises((ValueError, RuntimeError)):  # transformers raises its own RuntimeError over what is logged
        LlamaForCausalLM.from_pretrained(folder)


def test_torchaos_tensors_are_checked_when_they_are_built(folders: Callable[[str], Path]) -> None:
    for recipe in ("torchao-int8", "torchao-fp8"):
        tensors = load_file(folders(recipe) / "model.safetensors")
        with safe_open(folders(recipe) / "model.safetensors", "pt") as file:
            metadata = file.metadata()
        name = "model.layers.0.mlp.up_proj.weight"
        alone = {**metadata, "tensor_names": json.dumps([name])}
        own = {n: t for n, t in tensors.items() if n.startswith("model.layers.0.mlp.up_proj._weight")}
        built, _ = unflatten_tensor_state_dict(own, alone)
        assert flatten_tensor_state_dict(built)[0].keys() == own.keys()
        for part, t in own.items():
            kinds = [] if part.endswith("zero_point") else [t.view(torch.uint8).to(torch.complex64)]
            for bad in (t[:-1], *kinds):
                with pytest.raises(ValueError, match=r"Tensor"):
                    unflatten_tensor_state_dict({**own, part: bad}, alone)


TILES = torch.zeros(4, 2, 32, 4, dtype=torch.int32)  # N = 32, K = 256
PAIRS = torch.zeros(8, 32, 2, dtype=torch.bfloat16)  # scale and zero point of groups of 32


PARTS = {
    "right": (TILES, PAIRS),
    "groups of 64": (TILES, PAIRS[:4]),
    "scales of fewer rows": (TILES, PAIRS[:, :8]),
    "scales of one group": (TILES, PAIRS[0]),
    "codes of fewer rows": (TILES[:1], PAIRS),
    "codes of a shorter K": (TILES[:, :1], PAIRS),
    "codes of three dimensions": (TILES[0], PAIRS),
    "codes of two dimensions": (TILES.flatten(1), PAIRS),
    "no codes": (TILES[:0], PAIRS),
}


@pytest.mark.parametrize("case", PARTS)
def test_tiles_of_int4_are_checked_when_they_are_built(case: str) -> None:
    """tinygemm's padded codes of 4 dimensions, which torchao packs on a GPU alone."""
    right = Int4TilePackedTo4dTensor(*PARTS["right"], [1, 32], torch.Size((32, 256)))
    tensors, metadata = flatten_tensor_state_dict({"layer.weight": right})
    codes, scale = PARTS[case]
    given = {name: codes if name.endswith("qdata") else scale for name in tensors}
    if case == "right":
        built, _ = unflatten_tensor_state_dict(given, metadata)
        assert type(built["layer.weight"]) is Int4TilePackedTo4dTensor
    else:
        with pytest.raises(ValueError, match="Int4TilePackedTo4dTensor: codes"):
            unflatten_tensor_state_dict(given, metadata)


@pytest.mark.parametrize("recipe", ["vllm-w4a16-g32", "vllm-int8", "vllm-fp8"])
def test_a_wrong_width_or_group_in_a_compressed_tensors_config_is_refused(recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False)).bfloat16()
    aoquant.quantize_(model, recipe)
    aoquant.export(model, tmp_path)
    aoquant.load_pretrained(tmp_path)
    path = tmp_path / "config.json"
    right = path.read_text()
    changes = [("num_bits", bits) for bits in (1, 2, 3, 4, 5, 6, 7, 8)]
    changes += [("group_size", size) for size in (16, 64, 128)] if "g32" in recipe else []
    tried = 0
    for key, value in changes:
        config = json.loads(right)
        for group in config["quantization_config"]["config_groups"].values():
            before, group["weights"][key] = group["weights"][key], value
        if before == value:
            continue
        path.write_text(json.dumps(config))
        tried += 1
        with pytest.raises(ValueError, match=str(tmp_path)):
            aoquant.load_pretrained(tmp_path, verify_checksums=False)
    assert tried >= 7


@pytest.fixture(scope="module")
def kinds(
    folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Any]]:
    """A folder for each kind of module that holds packed weights, and the model's class."""
    base = tmp_path_factory.mktemp("kinds")

    def made(kind: str) -> tuple[Path, Any]:
        if kind in ("linear", "embedding"):
            return folders("mxfp4" if kind == "linear" else "embedding"), LlamaForCausalLM
        if kind == "conv1d":
            model: Any = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64, n_positions=16))
        else:
            model = model_of(kind)
        if not (base / kind).exists():
            aoquant.quantize_(model, "mxfp4-experts" if kind != "conv1d" else "mxfp4")
            aoquant.save_pretrained(model, base / kind)
        return base / kind, type(model)

    return made


def turned(described: dict[str, Any]) -> None:
    described["_data"]["transposed"] = not described["_data"]["transposed"]


def retyped(described: dict[str, Any]) -> None:
    """Describe a weight of a linear layer as one of experts, and the other way round."""
    if described["_type"] == "PackedTensor":
        described["_type"] = "PackedExperts"
        described["_data"]["transposed"] = False
    else:
        described["_type"] = "PackedTensor"
        del described["_data"]["transposed"]


EXPERTS = ["mixtral", "gpt-oss", "qwen3-moe"]


@pytest.mark.parametrize(
    ("kind", "change"),
    [*((k, retyped) for k in ("linear", "embedding", "conv1d", *EXPERTS)), *((k, turned) for k in EXPERTS)],
)
def test_a_weight_described_as_another_class_is_refused_at_load(
    kinds: Callable[[str], tuple[Path, Any]], kind: str, change: Any, tmp_path: Path
) -> None:
    folder, model_class = kinds(kind)
    model_class.from_pretrained(folder)
    names = edited(folder, tmp_path / "copy", change)
    for load in (model_class.from_pretrained, lambda f: aoquant.load_pretrained(f, model_class)):
        with pytest.raises(ValueError, match="|".join(map(re.escape, names))):
            load(tmp_path / "copy")
