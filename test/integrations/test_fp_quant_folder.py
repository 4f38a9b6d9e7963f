"""FP-Quant's folders, written here by its definitions in float64: the stored codes and scales become packed layers,
float weights prepared ones, and a layer that cannot be taken is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.export_cases import packed
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from aoquant import Hadamard, PackedTensor, QATConfig, load_pretrained, quantize_, save_pretrained, unpack_
from aoquant.formats import layout
from aoquant.linear.prepared import QATLinear
from aoquant.linear.tensor import same_bits

IDS = torch.arange(16).view(2, 8)
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
VALUES = torch.cat([GRID, -GRID])
CASES: dict[str, dict[str, Any]] = {
    "mxfp4": {"forward_dtype": "mxfp4", "hadamard_group_size": 32},
    "mxfp4-quest": {"forward_dtype": "mxfp4", "forward_method": "quest", "hadamard_group_size": 64, "signs": 0xB00F},
    "mxfp4-gsr": {"forward_dtype": "mxfp4", "hadamard_group_size": 32, "transform_init": "gsr"},
    "nvfp4": {"forward_dtype": "nvfp4", "hadamard_group_size": 128},
    "nvfp4-gsr": {"forward_dtype": "nvfp4", "hadamard_group_size": 16, "transform_init": "gsr"},
    "nvfp4-identity": {"forward_dtype": "nvfp4", "hadamard_group_size": 16, "transform_init": "identity"},
}


def matrix(size: int, init: str, signs: int) -> Tensor:
    """T of x T: Sylvester's matrix as bfloat16 holds it, rows with signs, or its columns by their sign changes."""
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    if init == "identity":
        return torch.eye(size).bfloat16()
    if init == "gsr":
        h = h[:, (h.diff(dim=0) != 0).sum(0).argsort()]
    rows = torch.tensor([-1.0 if signs >> i & 1 else 1.0 for i in range(size)])
    return (h * size**-0.5 * rows[:, None]).bfloat16()


def quantised(x: Tensor, t: Tensor, method: str, g: float) -> tuple[Tensor, Tensor]:
    """Codes (R, K) and stored scales (R, G) of x T, float64. g: the global scale."""
    y = (x.double().view(len(x), -1, len(t)) @ t.double()).view(len(x), -1, 16 if method == "nvfp4" else 32)
    if method == "nvfp4":
        scale = (g * y.abs().amax(-1) / 6).float().to(torch.float8_e4m3fn)
        unit = scale.double() / g
    else:
        v = y.std(-1, correction=0) * 2.92247856 / 6 if method == "quest" else y.abs().amax(-1)
        scale = torch.exp2((v + 1e-8).log2().floor()).float().to(torch.float8_e8m0fnu)
        unit = scale.float().double() / g
    away = (y / unit[..., None]).abs()[..., None].sub(GRID).abs()
    nearest = (away + 1e-12 * (torch.arange(8) % 2)).argmin(-1)  # ties to even
    return (nearest + 8 * (y < 0)).flatten(1).to(torch.uint8), scale


class Folder:
    """A float model, and FP-Quant's folder of it."""

    def __init__(self, path: Path, signs: int = 0, **options: Any) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64, attention_bias=True)
        self.model = LlamaForCausalLM(config).bfloat16().eval()
        self.path, self.stored, self.pad = path, dict(self.model.state_dict()), signs == 0
        self.method = "nvfp4" if options["forward_dtype"] == "nvfp4" else options.get("forward_method", "abs_max")
        self.matrix = matrix(options["hadamard_group_size"], options.get("transform_init", "hadamard"), signs)
        self.options = {"quant_method": "fp_quant", "modules_to_not_convert": ["lm_head"], **options}
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                self.layer(name, module)
        self.write()

    def layer(self, name: str, module: nn.Linear) -> None:
        g = {"abs_max": 3.0, "quest": 1.0, "nvfp4": 96.0}[self.method]
        parts = {"forward_hadamard_matrix": self.matrix.clone(), "backward_hadamard_matrix": self.matrix.clone()}
        parts |= {f"{of}_global_scale": torch.tensor([g], dtype=torch.bfloat16) for of in ("weight", "act")}
        if not self.options.get("store_master_weights"):
            codes, scales = quantised(module.weight, self.matrix, self.method, g)
            rows = torch.full((-len(scales) % 128 * self.pad, scales.shape[1]), 0xFF, dtype=torch.uint8)
            parts |= {"qweight": layout.pack(codes, 4), "scales": torch.cat([scales.view(torch.uint8), rows])}
            del self.stored[f"{name}.weight"]
        self.stored |= {f"{name}.{part}": tensor for part, tensor in parts.items()}

    def write(self) -> None:
        self.model.config.save_pretrained(self.path)
        config = json.loads((self.path / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLM"], "quantization_config": self.options}
        (self.path / "config.json").write_text(json.dumps(config))
        save_file(self.stored, self.path / "model.safetensors", {"format": "pt"})

    def output(self, name: str, x: Tensor) -> Tensor:
        """x through an `FPQuantLinear`, in float64."""
        of = {part: self.stored[f"{name}.{part}"] for part in ("qweight", "scales", "act_global_scale")}
        g = of["act_global_scale"].double()
        kind = torch.float8_e4m3fn if self.method == "nvfp4" else torch.float8_e8m0fnu
        weight = VALUES[layout.unpack(of["qweight"], 4, x.shape[1]).long()]
        wide = of["scales"][: len(weight)].view(kind).float().double()
        codes, scales = quantised(x, self.matrix, self.method, g.item())
        a = VALUES[codes.long()].view(*scales.shape, -1) * scales.float().double()[..., None]
        b = weight.view(*wide.shape, -1) * wide[..., None]
        return a.flatten(1) @ b.flatten(1).T / (g * g) + self.stored.get(f"{name}.bias", torch.zeros(1)).double()


@pytest.mark.parametrize("case", CASES)
def test_stored_codes_and_scales_are_multiplied(case: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "theirs", **CASES[case])
    model = load_pretrained(folder.path, LlamaForCausalLM)
    names = {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    assert packed(model).keys() == names and len(names) == 7
    x = torch.randn(24, 128).bfloat16()
    for name in names:
        weight: Any = packed(model)[name]
        stored = folder.stored[f"{name}.scales"][: len(weight)]
        assert torch.equal(weight.scale.view(torch.uint8), stored)
        if "gsr" not in case:
            assert torch.equal(weight.qdata.view(torch.uint8), folder.stored[f"{name}.qweight"])
        if weight.shape[1] == 128:
            y, want = model.get_submodule(name)(x).double(), folder.output(name, x)
            rows = 10 * (want.square().mean(1) / (y - want).square().mean(1)).log10()
            assert rows.median() > 50 and rows.min() > 30, name  # bfloat16 outputs; a tie may round otherwise
    logits = model(IDS).logits
    save_pretrained(model, tmp_path / "ours")
    again = load_pretrained(tmp_path / "ours", LlamaForCausalLM)
    assert all(same_bits(w, packed(model)[name]) for name, w in packed(again).items())
    assert torch.equal(again(IDS).logits, logits)


@pytest.mark.parametrize("case", ["mxfp4-quest", "nvfp4"])
def test_it_trains_on_from_the_stored_codes(case: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path, **CASES[case])
    model = load_pretrained(folder.path, LlamaForCausalLM, dtype=torch.float32)
    before, logits = packed(model), model(IDS).logits
    unpack_(model)
    assert torch.equal(model(IDS).logits, logits)
    quantize_(model, QATConfig(step="convert"))
    assert all(same_bits(w, before[name]) for name, w in packed(model).items())


def test_master_weights_become_prepared_layers(tmp_path: Path) -> None:
    options = {"forward_dtype": "mxfp4", "forward_method": "quest", "backward_dtype": "mxfp4"}
    folder = Folder(tmp_path, **options, hadamard_group_size=32, store_master_weights=True, signs=0xBEEF)
    model = load_pretrained(folder.path, LlamaForCausalLM)
    for name, module in folder.model.named_modules():
        layer = model.get_submodule(name)
        if isinstance(module, nn.Linear) and name != "lm_head":
            assert isinstance(layer, QATLinear) and torch.equal(layer.weight, module.weight)
            recipe = layer.prepared.recipe
            assert recipe.transform == Hadamard(32, 0xBEEF) and "mxfp4-quest" in recipe.fprop_weight.name
            assert recipe.dgrad_grad_output is not None and recipe.straight_through == "clipped"
    model(IDS).logits.sum().backward()
    logits = model(IDS).logits
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(IDS).logits, logits)


def test_from_pretrained_says_who_reads_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path, **CASES["mxfp4"])
    with pytest.raises(ValueError, match=r"aoquant\.load_pretrained"):
        AutoModelForCausalLM.from_pretrained(folder.path)


NAME = "model.layers.0.mlp.up_proj"


def change(part: str, to: Callable[[Tensor], Tensor] | None) -> Callable[[Folder], None]:
    def apply(folder: Folder) -> None:
        tensor = folder.stored.pop(f"{NAME}.{part}")
        if to is not None:
            folder.stored[f"{NAME}.{part}"] = to(tensor)

    return apply


def decoded(folder: Folder) -> None:
    for part in ("qweight", "scales"):
        del folder.stored[f"{NAME}.{part}"]
    folder.stored[f"{NAME}.dqweight"] = folder.model.get_submodule(NAME).weight.data
    folder.options["pseudoquantization"] = True


WRONG: dict[str, tuple[str, Callable[[Folder], None]]] = {
    "dqweight": ("mxfp4", decoded),
    "no scales": ("mxfp4", change("scales", None)),
    "no qweight": ("mxfp4", change("qweight", None)),
    "weight_global_scale": ("mxfp4", change("weight_global_scale", lambda t: t * 2)),
    "NaN": ("mxfp4", change("scales", lambda t: t.fill_(255))),
    "act_global_scale": ("nvfp4", change("act_global_scale", lambda t: t * torch.inf)),
    "scales uint8": ("nvfp4", change("scales", lambda t: t[:, :4].contiguous())),
    "forward_hadamard_matrix": ("nvfp4", change("forward_hadamard_matrix", lambda t: t.roll(16, 1).contiguous())),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_taken_is_refused_by_the_layers_name(what: str, tmp_path: Path) -> None:
    case, damage = WRONG[what]
    folder = Folder(tmp_path, **CASES[case])
    damage(folder)
    folder.write()
    with pytest.raises(ValueError, match=f"{NAME}.*{what.replace('no ', '')}"):
        load_pretrained(folder.path, LlamaForCausalLM)


def test_place_holders_of_transformers_are_left_out(tmp_path: Path) -> None:
    """What it stores of a layer that it has loaded: empty parts in place of those that the layer lacks."""
    folder = Folder(tmp_path, **CASES["mxfp4"])
    folder.stored |= {f"{NAME}.{part}": torch.zeros(0) for part in ("weight", "dqweight")}
    folder.write()
    model = load_pretrained(folder.path, LlamaForCausalLM)
    assert isinstance(packed(model)[NAME], PackedTensor)
    assert load_file(folder.path / "model.safetensors")[f"{NAME}.weight"].numel() == 0
