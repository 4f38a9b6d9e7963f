"""Packed experts in a stand-in of vLLM's mixture-of-experts layer: its placeholders, its loader that selects, narrows
and copies, tensor and expert parallelism. vLLM itself runs in test/engines.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.moe_models import IDS, MODELS, model_of
from torch import Tensor, nn
from torchao.quantization import FqnToConfig

import aoquant
from aoquant import IntxWeightConfig, PackedTensor, QATConfig, get_recipe, quantize_
from aoquant.experts.packed_experts import PackedExperts
from aoquant.integrations import vllm_experts, vllm_plugin, vllm_sync

NAMES = {"mixtral": ("block_sparse_moe", "w1 w2 w3"), "qwen3-moe": ("mlp", "gate_proj down_proj up_proj")}
CASES = [
    ("mixtral", "int4-g32"),
    ("qwen3-moe", "mxfp4-h32"),
    ("qwen3-moe", "fp8"),
]


@cache
def outline(family: str) -> vllm_experts.Outline:
    return vllm_experts.Outline(MODELS[family][1])


class Base:
    """vLLM's FusedMoEMethodBase."""

    def __init__(self, moe: Any) -> None:
        self.moe = moe


class Layer(nn.Module):
    """vLLM's RoutedExperts in small: rank of `ranks`, which share rows and columns, or experts where `parallel`."""

    def __init__(self, config: Any, family: str, prefix: str, rank: int = 0, ranks: int = 1, *, parallel: bool = False):
        super().__init__()
        self.rank, self.ranks, self.parallel = rank, ranks, parallel
        self.moe_config = SimpleNamespace(has_bias=False, is_lora_enabled=False)
        self.activation, self.swiglu_limit, self.apply_router_weight_on_input = (
            SimpleNamespace(value="silu"),
            None,
            False,
        )
        self.expert_map = torch.full((8,), -1, dtype=torch.int32) if parallel else None
        self.names = NAMES[family][1].split()
        self.local = range(8)
        if self.expert_map is not None:
            self.local = range(rank * 8 // ranks, (rank + 1) * 8 // ranks)
            self.expert_map[self.local.start : self.local.stop] = torch.arange(len(self.local), dtype=torch.int32)
        self.method = vllm_experts.method_for(config, self, prefix, outline(family), Base)
        if self.method is not None:
            inner = 64 if parallel else 64 // ranks
            self.method.create_weights(self, len(self.local), 64, inner, torch.bfloat16, weight_loader=self.load)
            assert not any(p.requires_grad for p in self.parameters()), "vLLM's own weights have no gradient"

    def load(self, name: str, tensor: Tensor) -> str:
        """As vLLM: `tensor` is a stack of one expert there, unbound again."""
        expert, own = name.removesuffix(".weight").split(".")
        if int(expert) not in self.local:
            return "none"
        (piece,) = tensor.unsqueeze(0).unbind()
        weight = "w2_weight" if own == self.names[1] else "w13_weight"
        target, dim = getattr(self, weight).data[int(expert) - self.local.start], int(own == self.names[1])
        if not self.parallel:
            size = piece.shape[dim] // self.ranks
            piece = piece.narrow(dim, self.rank * size, size)
        if weight == "w13_weight":
            half = target.shape[0] // 2
            target = target.narrow(0, half * int(own == self.names[2]), half)
        target.copy_(piece)
        return weight

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = self.method.apply(self, x, weights.float(), ids.int(), None, None)
        return y


class Model(nn.Module):
    """A model of such layers and of float parameters, which takes weights by their names in files."""

    def __init__(self, prepared: Any, family: str, config: Any, **ranks: Any) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        for i in range(2):
            prefix = f"model.layers.{i}.{NAMES[family][0]}.experts"
            parent: nn.Module = self
            for own in prefix.split("."):
                if own not in parent._modules:
                    parent.add_module(own, nn.Module())
                parent = parent.get_submodule(own)
            parent.add_module("routed_experts", Layer(config, family, prefix, **ranks))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            prefix, found, rest = name.partition(".experts.")
            if found:
                loaded.add(f"{prefix}.experts.routed_experts.{self.layer(prefix).load(rest, tensor)}")
            else:
                self.found[name] = tensor
        return loaded

    def layer(self, prefix: str) -> Layer:
        found = self.get_submodule(f"{prefix}.experts.routed_experts")
        assert isinstance(found, Layer)
        return found


def routed(model: Any) -> list[tuple[Tensor, ...]]:
    """Inputs, experts, weights and outputs of every layer of experts."""
    calls: list[tuple[Tensor, ...]] = []
    hooks = [
        layer.mlp.experts.register_forward_hook(lambda _, given, y: calls.append((*given, y)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=IDS)
    for hook in hooks:
        hook.remove()
    return calls


def layers(model: Model, family: str) -> list[Layer]:
    return [model.layer(f"model.layers.{i}.{NAMES[family][0]}") for i in range(2)]


def made(family: str, recipe: str) -> tuple[Any, Any, Any]:
    """A prepared model, a converted copy, and the config that a checkpoint of it has."""
    prepared = model_of(family).eval()
    quantize_(prepared, get_recipe(recipe).prepare())
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    names = [f"model.layers.{i}.mlp.experts.{stack}" for i in range(2) for stack in ("gate_up_proj", "down_proj")]
    return prepared, converted, FqnToConfig(dict.fromkeys(names, get_recipe(recipe).make()))


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_a_folder_is_served_with_the_bits_of_the_converted_layer(family: str, recipe: str, tmp_path: Path) -> None:
    prepared, converted, config = made(family, recipe)
    aoquant.save_pretrained(converted, tmp_path)
    model = Model(prepared, family, config)
    model.load_weights(vllm_plugin.weights_in(tmp_path))
    assert f"model.layers.0.{NAMES[family][0]}.gate.weight" in model.found
    assert isinstance(model.found["model.layers.0.self_attn.q_proj.weight"], PackedTensor)
    for wanted in (prepared, converted):
        for layer, (x, ids, weights, y) in zip(layers(model, family), routed(wanted), strict=True):
            assert isinstance(layer.w13_weight.data, PackedExperts) and type(layer.method).__mro__[2] is Base
            with torch.inference_mode():  # as vLLM runs
                assert torch.equal(layer(x, ids, weights), y)


def test_ranks_share_rows_and_columns_or_experts(tmp_path: Path) -> None:
    """Codes of two ranks are those of one; a token whose experts are one rank's gets its whole sum there."""
    prepared, converted, config = made("mixtral", "int4-g32")
    aoquant.save_pretrained(converted, tmp_path)
    cut = [Model(prepared, "mixtral", config, rank=r, ranks=2) for r in (0, 1)]
    parted = [Model(prepared, "mixtral", config, rank=r, ranks=2, parallel=True) for r in (0, 1)]
    for model in (*cut, *parted):
        model.load_weights(vllm_plugin.weights_in(tmp_path))
    for i, (x, ids, weights, y) in enumerate(routed(converted)):
        experts = converted.model.layers[i].mlp.experts
        ours = [layers(model, "mixtral")[i] for model in cut]
        gate, up = experts.gate_up_proj.dequantize().chunk(2, 1)
        for r, layer in enumerate(ours):
            wanted = torch.cat([gate.chunk(2, 1)[r], up.chunk(2, 1)[r]], 1)
            assert torch.equal(layer.w13_weight.dequantize(), wanted)
        assert torch.equal(torch.cat([m.w2_weight.dequantize() for m in ours], 2), experts.down_proj.dequantize())
        for r, model in enumerate(parted):
            layer = layers(model, "mixtral")[i]
            assert layer.w2_weight.shape[0] == 4
            mine, part = (ids // 4 == r), layer(x, ids, weights)
            assert mine.all(1).any() and torch.equal(part[mine.all(1)], y[mine.all(1)])
            assert torch.equal(part[~mine.any(1)], torch.zeros_like(y[~mine.any(1)]))


@pytest.mark.parametrize("family", NAMES)
def test_sync_gives_experts_in_training_in_the_tensors_that_are_there(family: str) -> None:
    prepared, _, config = made(family, "int4-g32")
    engine = Model(prepared, family, config)
    before = [p.qdata.data_ptr() for p in engine.parameters()]
    torch.manual_seed(1)
    with torch.no_grad():
        for p in prepared.parameters():
            p += torch.randn_like(p) * 0.05 * p.abs().mean()
    worker = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=object()))
    served: Any = SimpleNamespace(llm_engine=worker, reset_prefix_cache=lambda: True)
    served.apply_model = lambda function: [function(engine)]
    assert vllm_sync.sync_vllm(served, prepared) == 8 + 4  # linear layers, stacks
    assert [p.qdata.data_ptr() for p in engine.parameters()] == before
    for layer, (x, ids, weights, y) in zip(layers(engine, family), routed(prepared), strict=True):
        assert torch.equal(layer(x, ids, weights), y)
    gate = engine.found[f"model.layers.1.{NAMES[family][0]}.gate.weight"]
    assert torch.equal(gate, prepared.model.layers[1].mlp.gate.weight)
    other = Model(prepared, family, FqnToConfig(dict.fromkeys(config.fqn_to_config, IntxWeightConfig(4, 32))))
    served.apply_model = lambda function: [function(other)]
    with pytest.raises(ValueError, match=r"experts\.\w+ is prepared as \('int4-g32'.*vLLM serves \('intx4-g32'"):
        vllm_sync.sync_vllm(served, prepared)


def test_float_experts_stay_vllms_own() -> None:
    config = FqnToConfig({"model.layers.0.mlp.experts.down_proj": None, "model.layers.0.mlp.gate.weight": None})
    rest = FqnToConfig({"_default": IntxWeightConfig(4, 32)})  # of linear layers: experts are quantised by name
    for given in (config, rest, IntxWeightConfig(4, 32)):
        assert Layer(given, "mixtral", "model.layers.0.block_sparse_moe.experts").method is None
    assert vllm_experts.method_in_vllm(SimpleNamespace(torchao_config=config), None, "") is None


@pytest.mark.parametrize("what", ["biases", "activation", "LoRA adapters", "routing weights", "clamped gate"])
def test_layers_that_packed_experts_have_no_form_for_are_refused(what: str) -> None:
    name = "model.layers.0.mlp.experts"
    config = FqnToConfig({f"{name}.down_proj": IntxWeightConfig(4, 32)})
    layer: Any = Layer(FqnToConfig({}), "qwen3-moe", name)
    if what == "activation":
        layer.activation = SimpleNamespace(value="relu2_no_mul")
    layer.moe_config = SimpleNamespace(has_bias=what == "biases", is_lora_enabled=what == "LoRA adapters")
    layer.apply_router_weight_on_input = what == "routing weights"
    layer.swiglu_limit = 7.0 if what == "clamped gate" else None
    with pytest.raises(ValueError, match=rf"{name}: .*{what}"):
        vllm_experts.method_for(config, layer, name, outline("qwen3-moe"), Base)


def test_other_folders_are_read_as_vllm_does(tmp_path: Path) -> None:
    """A loader asks for ours where a layer has experts and aoquant wrote the folder."""

    class Loader:
        counter_before_loading_weights = 0.0

        def _prepare_weights(self, **given: Any) -> tuple[str, list[str], bool, str]:
            folder = Path(given["model_name_or_path"])
            files = [str(path) for path in folder.glob("*.safetensors")]
            return str(folder), files, bool(files), "model.safetensors.index.json"

        def get_all_weights(self, model_config: Any, model: nn.Module) -> Any:
            return iter([("stock", torch.zeros(1))])

    vllm_plugin._patch_loader(Loader)
    _, converted, config = made("qwen3-moe", "int4-g32")
    aoquant.save_pretrained(converted, tmp_path / "ours")
    model_of("qwen3-moe").save_pretrained(tmp_path / "floats")
    (tmp_path / "pickled").mkdir()
    experts = Layer(config, "qwen3-moe", "model.layers.0.mlp.experts")
    for folder, method, model, ours in (
        ("ours", "torchao", experts, True),
        ("ours", "torchao", nn.Sequential(nn.Linear(1, 1), experts), True),
        ("floats", "torchao", experts, False),
        ("pickled", "torchao", experts, False),
        ("ours", "torchao", nn.Linear(1, 1), False),
        ("ours", None, experts, False),
    ):
        asked = SimpleNamespace(model=str(tmp_path / folder), revision=None, quantization=method)
        first = next(iter(Loader().get_all_weights(asked, model)))[0]
        assert (first != "stock") == ours
    floats = nn.Linear(1, 1)
    floats.quant_method = None
    Loader().get_all_weights(
        SimpleNamespace(model=str(tmp_path / "ours"), revision=None, quantization="torchao"), floats
    )
    assert floats._cpu_skip_gemm_dispatch  # vLLM keeps its weight, which sync_vllm copies into
