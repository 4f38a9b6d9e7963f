"""The model of a row: prepared for training, then deployed.

`Student` is fresh on every `make`: the float model copied and prepared for the row, with the random state of a seed.
The trained weights are loaded into such a copy before it is scored and converted, so that nothing of the training
(compiled layers, a captured graph) is in what is scored. torchao's rows are prepared and converted by torchao's own
`QATConfig` and `quantize_`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerRow,
)
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.quantization.quantize_.common import KernelPreference

from aoquant import CalibrateConfig, KVCacheConfig, QATConfig, calibrate_ptq, quantize_
from aoquant.integrations.job.models import convert, prepare
from aoquant.integrations.plans import with_embeddings
from aoquant.kv import hook
from aoquant.planning.sizes import stored_bytes
from aoquant.recipes import get_recipe, list_recipes, mixed
from experiments.rows import Row

CALIBRATION, BATCH = 128, 8  # blocks that calibrated PTQ sees, and those of one forward
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}  # as torchao's PR 2986 adapts every linear


def _mx(element: torch.dtype) -> Any:
    emulated = KernelPreference.EMULATED  # Hopper has no MX GEMM
    return MXDynamicActivationMXWeightConfig(activation_dtype=element, weight_dtype=element, kernel_preference=emulated)


# what torchao's own QATConfig takes, and Hopper runs
TORCHAO: dict[str, Callable[[], Any]] = {
    "int4-g32": lambda: Int4WeightOnlyConfig(group_size=32),
    "int4-g128": lambda: Int4WeightOnlyConfig(group_size=128),
    "intx4-g32": lambda: IntxWeightOnlyConfig(torch.int4, PerGroup(32)),  # type: ignore[attr-defined]
    "int8-int4": lambda: Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),  # type: ignore[attr-defined]
    "fp8-int4": lambda: Float8DynamicActivationInt4WeightConfig(int4_packing_format="plain"),
    "fp8": lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    "mxfp8": lambda: _mx(torch.float8_e4m3fn),
    "mxfp4": lambda: _mx(torch.float4_e2m1fn_x2),
}


def but_the_head(module: nn.Module, name: str) -> bool:
    """torchao's `filter_fn`: the layers that aoquant quantises by default."""
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] != "lm_head"


class Student:
    """Makes the models of a row. float_model is not changed. blocks_BT: token ids to calibrate on, where needed.
    method: of calibrated PTQ, such as "gptq"; training starts from its codes, under held scales. "": the nearest codes,
    and training starts from the float weights. embeddings: a recipe for embedding and head; "": they stay as they are.
    layers: other recipes for some layers, as `recipes.mixed` takes them.
    """

    def __init__(
        self,
        row: Row,
        float_model: Any,
        blocks_BT: Tensor,
        method: str = "",
        embeddings: str = "",
        layers: Sequence[str] = (),
    ) -> None:
        self.row, self.float_model, self.blocks_BT = row, float_model, blocks_BT
        self.method, self.embeddings, self.layers = method, embeddings, layers

    def prepared(self, seed: int) -> Any:
        """A fresh model to train, with the random state of `seed`."""
        model, row = copy.deepcopy(self.float_model), self.row
        if row.kind == "torchao":
            torchao_quantize_(model, TorchaoQATConfig(TORCHAO[row.recipe](), step="prepare"), filter_fn=but_the_head)
            made = {type(m).__module__.partition(".")[0] for m in _linears(model).values()}
            assert made == {"torchao"}, made  # torchao's simulation, not ours
        elif self.method:
            self._calibrate(model, self._training(seed=seed), "prepare")
        elif row.kind != "float":
            options = {"scales": "learned"} if row.trick == "scales" else {}
            prepare(model, self._training(seed=seed, **options), self.blocks_BT, batch_size=8)
        if row.kind == "lora":
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(seed)
            model = get_peft_model(model, LoraConfig(**LORA))
        return model

    def converted(self, prepared: Any) -> Any:
        """What is deployed; `prepared` is not changed."""
        row, model = self.row, copy.deepcopy(prepared)
        if row.kind == "lora":
            model = model.merge_and_unload()
        if row.kind == "torchao":
            torchao_quantize_(model, TorchaoQATConfig(TORCHAO[row.recipe](), step="convert"), filter_fn=but_the_head)
        elif row.kind != "float":
            convert(model)
        return model.eval()

    def ptq(self) -> Any:
        """The float model quantised without training."""
        model, row = copy.deepcopy(self.float_model), self.row
        if row.kind == "torchao":
            torchao_quantize_(model, TORCHAO[row.recipe](), filter_fn=but_the_head)
            return model
        if self.method:
            self._calibrate(model, mixed(row.recipe, self.layers), None)
            return model
        prepare(model, self._training(), self.blocks_BT, batch_size=8)
        quantize_(model, _convert())
        return model

    def _training(self, **options: Any) -> Any:
        """Return the config that trains the row."""
        layers = self.layers
        if self.embeddings:
            layers = with_embeddings(self.float_model, self.embeddings, layers)
        if not layers:
            return _training(self.row.recipe, **options)
        return mixed(self.row.recipe, layers, make=lambda recipe: recipe.prepare(**options))

    def _calibrate(self, model: Any, config: Any, step: str | None) -> None:
        batches = self.blocks_BT[:CALIBRATION].to(model.device).split(BATCH)
        calibrate_ptq(model, [{"input_ids": ids} for ids in batches], CalibrateConfig(config, self.method), step=step)


def _training(recipe: str, **options: Any) -> QATConfig:
    """Return the config that trains a recipe. "kv-FORMAT" and "kv-FORMAT-query" are KV caches alone, and after another
    recipe's name both.
    """
    layers, kv, name = recipe.rpartition("kv-")
    if not kv or recipe in {known.name for known in list_recipes()}:
        return get_recipe(recipe).prepare(**options)
    cache = KVCacheConfig(name.removesuffix("-query"), query="fp8" if name.endswith("-query") else None)
    if layers:
        return get_recipe(layers.removesuffix("-")).prepare(kv_cache=cache, **options)
    return QATConfig(cache, step="prepare", **options)


def _convert() -> Any:
    return QATConfig(step="convert")


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if but_the_head(m, name)}


def weight_bits(model: nn.Module, float_model: nn.Module) -> float:
    """Bits a weight of the layers that `model` quantises, scales included; the dtype's own where there are none.

    A model that quantises KV caches alone has the bits of a value in a key.
    """
    floats = dict(float_model.named_parameters())
    quantised = [(p, floats[n]) for n, p in model.named_parameters() if n in floats and type(p) is not type(floats[n])]
    if not quantised and (caches := hook.quantised(model)):
        module = next(iter(caches.values()))
        k, d = module.kv_quant.config.k_format, module.head_dim
        return 8.0 * (k.row_bytes(d) + k.scale_bytes) / d
    if not quantised:
        return 8.0 * next(iter(floats.values())).element_size()
    return 8 * sum(stored_bytes(p) for p, _ in quantised) / sum(f.numel() for _, f in quantised)
