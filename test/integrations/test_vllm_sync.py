"""`sync_vllm` against a stand-in of an engine: its fused layers, its loaders, shards of tensor parallelism. The engine
itself runs in test/engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.export_cases import llama
from torch import Tensor, nn
from torch.nn import functional as F

import aoquant
from aoquant import (
    IntxWeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    PackedWeightConfig,
    QATConfig,
    quantize_,
)

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
WHOLE = {part: whole for whole, parts in FUSED.items() for part in parts}
ROW_PARALLEL = ("o_proj", "down_proj")
BF16, F16 = torch.bfloat16, torch.float16
INT4 = PackedWeightConfig("int4-g32")
X = torch.linspace(-2, 2, 3 * 128).view(3, 128).to(torch.bfloat16)


class Engine(nn.Module):
    """vLLM's model in small: packed placeholders of fused layers, and a loader that cuts, narrows and copies."""

    packed_modules_mapping = FUSED

    def __init__(self, config: Any, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks, self.parts = rank, ranks, {}
        self._do_torchao_reload = True  # vLLM's mark: load_weights would quantise float weights
        self.cpu_linear = None  # on a CPU the head multiplies by a packed copy of its weight
        converted = llama()
        for name, module in converted.named_modules():
            parent, _, own = name.rpartition(".")
            if isinstance(module, nn.Linear) and own != "lm_head":
                shape, across = list(module.weight.shape), own in ROW_PARALLEL
                shape[across] //= ranks
                place = f"{parent}.{WHOLE.get(own, own)}"
                start = sum(n for n, *_ in self.parts.get(place, []))
                self.parts.setdefault(place, []).append((shape[0], own, start))
        for place, parts in self.parts.items():
            k = converted.get_submodule(f"{place.rpartition('.')[0]}.{parts[0][1]}").in_features
            k //= ranks if place.endswith(ROW_PARALLEL) else 1
            linear = nn.Sequential(nn.Linear(k, sum(n for n, *_ in parts), bias=False, dtype=torch.bfloat16))
            nn.init.zeros_(linear[0].weight)
            quantize_(linear, config)
            self._add(place, linear[0])
        for name, p in converted.named_parameters():
            if "_proj" not in name:
                holder = nn.Module()
                holder.weight = nn.Parameter(torch.zeros_like(p), requires_grad=False)
                self._add(name.removesuffix(".weight"), holder)

    def _add(self, name: str, module: nn.Module) -> None:
        parent: nn.Module = self
        *path, own = name.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(own, module)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        assert not self._do_torchao_reload
        loaded = set()
        for name, tensor in weights:
            module, _, own = name.removesuffix(".weight").rpartition(".")
            place = f"{module}.{WHOLE.get(own, own)}" if module else own
            target = self.get_submodule(place).weight.data
            if place in self.parts:
                ((n, _, start),) = (part for part in self.parts[place] if part[1] == own)
                dim = int(own in ROW_PARALLEL)
                size = tensor.shape[dim] // self.ranks
                tensor = tensor.narrow(dim, self.rank * size, size)
                target = target.narrow(0, start, n)
            assert target.shape == tensor.shape
            target.copy_(tensor)
            loaded.add(f"{place}.weight")
        return loaded


class Served:
    """`vllm.LLM`'s part that sync_vllm calls."""

    def __init__(self, model: nn.Module, *, elsewhere: bool = False) -> None:
        worker = None if elsewhere else object()
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        self.model, self.cached = model, True

    def apply_model(self, function: Callable[[nn.Module], Any]) -> list[Any]:
        return [function(self.model)]

    def reset_prefix_cache(self) -> bool:
        self.cached = False
        return True


def trained(config: Any) -> Any:
    """A prepared model some steps away from the weights that it began with."""
    model = llama()
    quantize_(model, QATConfig(config, step="prepare"))
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn_like(p) * 0.05 * p.abs().mean()
    return model


def places(model: nn.Module) -> list[int]:
    return [getattr(p, "qdata", p).data_ptr() for p in model.parameters()]


def parts_of(weight: Tensor) -> list[Tensor]:
    parts = (weight.qdata, weight.scale, weight.zero_point) if isinstance(weight, PackedTensor) else (weight,)
    return [part for part in parts if part is not None]


CONFIGS = {
    "int4": PackedWeightConfig("int4-g32"),
    "nvfp4": NVFP4WeightConfig(),
    "fp8": PackedWeightConfig("fp8-row", "fp8-row-vllm"),
    "mxfp4-h32": MXFP4WeightConfig(transform=aoquant.Hadamard(32)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_layers_compute_what_the_model_in_training_does(name: str) -> None:
    engine, prepared = Engine(CONFIGS[name]), trained(CONFIGS[name])
    served, before = Served(engine), places(engine)
    assert aoquant.sync_vllm(served, prepared) == 14
    assert places(engine) == before and engine._do_torchao_reload and not served.cached
    assert engine.cpu_linear is F.linear
    with torch.no_grad():
        for i in (0, 1):
            theirs, ours = engine.get_submodule(f"model.layers.{i}"), prepared.model.layers[i]
            qkv = [layer(X) for layer in (ours.self_attn.q_proj, ours.self_attn.k_proj, ours.self_attn.v_proj)]
            assert torch.equal(F.linear(X, theirs.self_attn.qkv_proj.weight), torch.cat(qkv, -1))
            assert torch.equal(F.linear(X, theirs.self_attn.o_proj.weight), ours.self_attn.o_proj(X))
            mlp = [ours.mlp.gate_proj(X), ours.mlp.up_proj(X)]
            assert torch.equal(F.linear(X, theirs.mlp.gate_up_proj.weight), torch.cat(mlp, -1))
    for name, p in prepared.named_parameters():
        if "_proj" not in name:
            assert torch.equal(engine.get_parameter(name), p)


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_hold_the_rows_and_columns_of_one(name: str) -> None:
    """Rows of fused layers, columns of the others: together the codes of the whole."""
    prepared = trained(CONFIGS[name])
    engines = [Engine(CONFIGS[name], rank, 2) for rank in (0, 1)]
    for engine in engines:
        aoquant.sync_vllm(Served(engine), prepared)
    quantize_(prepared, QATConfig(step="convert"))
    attention = prepared.model.layers[1].self_attn
    shards = [e.get_submodule("model.layers.1.self_attn.qkv_proj").weight.dequantize() for e in engines]
    q, k, v = (m.weight.dequantize() for m in (attention.q_proj, attention.k_proj, attention.v_proj))
    wanted = [torch.cat([w.chunk(2)[rank] for w in (q, k, v)]) for rank in (0, 1)]
    assert torch.equal(shards[0], wanted[0]) and torch.equal(shards[1], wanted[1])
    down = [e.get_submodule("model.layers.1.mlp.down_proj").weight for e in engines]
    if "h32" not in name:  # behind a transform values of columns are found in one piece
        whole = prepared.model.layers[1].mlp.down_proj.weight.dequantize()
        assert torch.equal(torch.cat([w.dequantize() for w in down], 1), whole)
    codes = prepared.model.layers[1].mlp.down_proj.weight.qdata
    assert torch.equal(torch.cat([w.qdata for w in down], 1).view(torch.uint8), codes.view(torch.uint8))


def test_groups_that_a_rank_would_cut_are_refused() -> None:
    """K = 128 in two shards has no whole group of 128."""
    with pytest.raises(ValueError, match=r"128"):
        Engine(PackedWeightConfig("intx4-g128"), 0, 2)


def test_engines_that_do_not_follow_are_refused() -> None:
    config = PackedWeightConfig("int4-g32")
    prepared, engine = trained(config), Engine(PackedWeightConfig("int4-g64"))
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING"):
        aoquant.sync_vllm(Served(engine, elsewhere=True), prepared)
    before = [w.qdata.clone() for w in engine.parameters() if isinstance(w, PackedTensor)]
    with pytest.raises(ValueError, match=r"q_proj is prepared as \('int4-g32'.*vLLM serves \('int4-g64'"):
        aoquant.sync_vllm(Served(engine), prepared)
    after = [w.qdata for w in engine.parameters() if isinstance(w, PackedTensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    floats, more = Engine(config), Engine(config)
    floats.get_submodule("model.layers.0.self_attn.qkv_proj").weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="q_proj"):
        aoquant.sync_vllm(Served(floats), prepared)
    more.extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="extra"):
        aoquant.sync_vllm(Served(more), prepared)
    with pytest.raises(ValueError, match="prepared"):
        aoquant.sync_vllm(Served(engine), llama())
    with pytest.raises(ValueError, match="got str"):
        aoquant.sync_vllm("served", prepared)


def packed_of(engine: nn.Module) -> list[Tensor]:
    return [w.qdata.clone() for w in engine.parameters() if isinstance(w, PackedTensor)]


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (PackedWeightConfig("int4-g32", "int8-row"), r"\('int4-g32', 'int8-row'"),
        (PackedWeightConfig("int4-g32", contract="dequantize"), r"\('int4-g32', '', 'dequantize'"),
    ],
    ids=["activation", "contract"],
)
def test_layers_of_one_format_that_multiply_otherwise_are_refused(served: Any, said: str) -> None:
    engine = Engine(served)
    before = packed_of(engine)
    with pytest.raises(ValueError, match=rf"q_proj is prepared as \('int4-g32'.*vLLM serves .*{said}"):
        aoquant.sync_vllm(Served(engine), trained(PackedWeightConfig("int4-g32")))
    assert all(torch.equal(a, b) for a, b in zip(before, packed_of(engine), strict=True))


def renamed(config: Any, *dtypes: torch.dtype) -> Any:
    """A model of packed layers, one for each dtype, by names that the model in training does not have."""
    engine = nn.Module()
    for i, dtype in enumerate(dtypes):
        layer = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=dtype))
        quantize_(layer, config)
        engine.add_module(f"renamed{i}", layer)
    return engine


@pytest.mark.parametrize(("dtypes", "got"), [((F16, BF16), "(float16.*bf|bfloat16.*f)loat16"), ((), "none")])
def test_engines_whose_packed_weights_are_of_no_one_dtype_are_refused(
    dtypes: tuple[torch.dtype, ...], got: str
) -> None:
    engine, loaded = renamed(INT4, *dtypes), []
    engine.load_weights = loaded.append
    with pytest.raises(ValueError, match=rf"sync_vllm: .*no packed weights of one dtype, got .*{got}"):
        aoquant.sync_vllm(Served(engine), trained(INT4))
    assert not loaded


def test_a_part_that_is_served_unfused_is_compared_by_its_own_name() -> None:
    engine = Engine(INT4)
    mlp = engine.get_submodule("model.layers.1.mlp")
    mlp.add_module("up_proj", renamed(PackedWeightConfig("int4-g64"), BF16).renamed0[0])
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj is prepared as .*vLLM serves \('int4-g64'"):
        aoquant.sync_vllm(Served(engine), trained(INT4))


@pytest.mark.parametrize("mark", [True, False])
def test_a_failed_load_leaves_the_engines_mark_and_its_prefix_cache(mark: bool) -> None:
    """vLLM's mark says how its next load_weights reads, so it is put back whatever happens."""
    engine = renamed(INT4, BF16)
    served, engine._do_torchao_reload = Served(engine), mark

    def fail(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        assert engine._do_torchao_reload is False
        raise RuntimeError("the loader failed")

    engine.load_weights = fail
    with pytest.raises(RuntimeError, match="the loader failed"):
        aoquant.sync_vllm(served, trained(INT4))
    assert engine._do_torchao_reload is mark and served.cached


@pytest.mark.parametrize(("scales", "tied"), [("dynamic", True), ("learned", False)])
def test_what_a_checkpoint_holds_is_sent_and_nothing_else(scales: str, tied: bool) -> None:
    """A tied head is sent as the embedding alone, and learned scales are parts of the codes. Some of vLLM's models
    return None from load_weights, which is no list of what they miss.
    """
    config, sent = IntxWeightConfig(4, 32), dict[str, Tensor]()
    model, engine = llama(tied=tied), renamed(IntxWeightConfig(4, 32), BF16)
    wanted = {name for name, _ in model.named_parameters()}
    quantize_(model, QATConfig(config, step="prepare", scales=scales))
    engine.load_weights = sent.update
    assert aoquant.sync_vllm(Served(engine), model) == 14
    assert {*sent} == wanted
    quantize_(model, QATConfig(step="convert"))
    for name, weight in model.named_parameters():
        assert isinstance(sent[name], PackedTensor) == ("_proj" in name)
        for ours, theirs in zip(parts_of(sent[name]), parts_of(weight.data), strict=True):
            assert torch.equal(ours, theirs), name
