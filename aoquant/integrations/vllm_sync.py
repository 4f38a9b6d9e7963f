"""Give a running vLLM engine the codes that a model in training has now: rollouts by vLLM.

vLLM's own `load_weights` takes what a checkpoint of the model would hold, one packed weight at a time, so fused layers,
tensor and expert parallelism are its business. Its loaders copy into the tensors that the engine has, so CUDA graphs
stay valid. Source: vLLM 0.32, `v1/engine` and `model_executor/model_loader/reload`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from aoquant._messages import check_model
from aoquant.experts.prepared import QATExperts
from aoquant.integrations.vllm_experts import STACKS, owner_in_files
from aoquant.linear.prepared import QATLayer
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor
from aoquant.refresh import deployed_recipe, encoded_now, is_state

_RELOADS = "_do_torchao_reload"  # vLLM's mark on a model: load_weights takes float weights and quantises them anew


@torch.no_grad()
def sync_vllm(llm: Any, prepared: nn.Module) -> int:
    """Give the model inside a running vLLM engine the codes, scales and floats that `prepared` has now; returns the
    layers encoded, and stacks of experts.

    llm: a `vllm.LLM` in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) that serves a converted copy of `prepared`,
        saved by `aoquant.save_pretrained`. One GPU, or tensor parallelism with
        distributed_executor_backend="external_launcher", where every rank calls this with the whole model.
    prepared: the model in training, on any device.

    No request may be running. The engine's prefix cache is emptied.

    Raises:
        ValueError: the engine is in another process; or the two do not belong together: formats, constant activation
            scales, layers that vLLM did not take. Formats are compared before anything changes.

    Example:

            llm = LLM("converted", enforce_eager=True)
            for batch in batches:
                sync_vllm(llm, model)
                rollouts = llm.generate(batch)
    """
    if not hasattr(llm, "llm_engine"):
        raise ValueError(f"sync_vllm: the first argument is a vllm.LLM, got {type(llm).__name__}")
    executor = getattr(llm.llm_engine, "model_executor", None)
    if getattr(executor, "driver_worker", None) is None:
        raise ValueError(
            "sync_vllm: the engine's model is in another process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported, and use "
            "one GPU or distributed_executor_backend='external_launcher'"
        )
    check_model(prepared, "prepared")
    layers = {name: m for name, m in prepared.named_modules() if isinstance(m, QATLayer)}
    experts = ((name, m) for name, m in prepared.named_modules() if isinstance(m, QATExperts))
    stacks = {f"{name}.{stack}": m for name, m in experts for stack in m.stacks}
    weights = [(f"{name}.weight", m.weight) for name, m in layers.items()]
    weights += [(name, m.get_parameter(name.rpartition(".")[2])) for name, m in stacks.items()]
    if sharded := [name for name, weight in weights if isinstance(weight, DTensor)]:
        raise ValueError(f"sync_vllm: {sharded[0]} is sharded over ranks: gather it first")
    if not layers and not stacks:
        raise ValueError("sync_vllm: the second model has no prepared layer; give (engine, model in training)")

    def load(model: nn.Module) -> None:
        dtype = _check(model, prepared, layers, stacks)
        reloads = getattr(model, _RELOADS, False)
        setattr(model, _RELOADS, False)
        try:
            loaded = model.load_weights(_weights(prepared, layers, stacks, dtype))  # type: ignore[operator]
        finally:
            setattr(model, _RELOADS, reloads)
        own = {name for name, _ in model.named_parameters()}
        if loaded is not None and (missed := sorted(own - set(loaded))):
            raise ValueError(f"sync_vllm: vLLM's model has parameters that the model in training lacks: {missed[:5]}")
        for module in model.modules():
            if hasattr(module, "cpu_linear"):  # on a CPU vLLM's head multiplies by a packed copy of its weight
                module.cpu_linear = F.linear  # type: ignore[assignment]

    llm.apply_model(load)
    llm.reset_prefix_cache()
    return len(layers) + len(stacks)


def _weights(
    prepared: nn.Module, layers: Mapping[str, QATLayer], stacks: Mapping[str, QATExperts], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Return what a converted checkpoint of `dtype` holds, by names in files; tensors are made when asked for."""
    from aoquant.export.weights import Weight, as_stored, given  # needs transformers

    tied, weights = set[int](), dict[str, Weight]()
    for name, tensor in prepared.state_dict(keep_vars=True).items():
        module, _, own = name.rpartition(".")
        if is_state(prepared.get_submodule(module), own) or id(tensor) in tied:
            continue
        tied.add(id(tensor))
        if name in stacks:
            weights[name] = Weight(name, "PackedExperts", _unread, partial(_expert, stacks[name], own, dtype))
        elif module in layers and own == "weight":
            weights[name] = Weight(name, "PackedTensor", partial(_packed, layers[module], dtype))
        else:
            weights[name] = Weight(name, "Tensor", given(tensor.detach()))
    for weight in as_stored(prepared, weights).values():
        yield weight.name_in_files, weight.read(True)


def _packed(layer: QATLayer, dtype: torch.dtype, codes: bool) -> Tensor:
    e, matrix = encoded_now(layer, dtype)
    return PackedTensor.from_encoded(e, deployed_recipe(layer), dtype, matrix)


def _expert(module: QATExperts, stack: str, dtype: torch.dtype, expert: int, codes: bool) -> PackedTensor:
    e, recipe = module.encode_expert(stack, expert, dtype), module.stacks[stack].recipe.deployed
    return PackedTensor.from_encoded(e, recipe, dtype)


def _unread(codes: bool) -> Tensor:
    raise AssertionError  # experts are read one by one


def _check(
    model: nn.Module, prepared: nn.Module, layers: Mapping[str, QATLayer], stacks: Mapping[str, QATExperts]
) -> torch.dtype:
    """Return the dtype that the engine's packed weights stand for.

    Raises ValueError where the engine's layer of a prepared layer's name holds another recipe. Layers that the engine's
    model names otherwise are compared when they are copied.
    """
    mapping: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    fused = {part: whole for whole, parts in mapping.items() for part in parts}
    modules = dict(model.named_modules())
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        module = modules.get(name) or modules.get(f"{parent}.{fused.get(own, own)}")
        if module is not None:
            _check_recipe(name, deployed_recipe(layer), getattr(module, "weight", None))
    for name, experts in stacks.items():
        owner, _, own = name.rpartition(".")
        module = modules.get(f"{owner_in_files(prepared, owner)}.routed_experts")
        if module is not None:
            weight = next((getattr(module, w, None) for w, stack in STACKS.items() if stack == own), None)
            _check_recipe(name, experts.stacks[own].recipe.deployed, weight)
    dtypes = {w.dtype for w in model.parameters() if isinstance(w, PackedTensor)}
    if len(dtypes) != 1:
        raise ValueError(f"sync_vllm: vLLM's model holds no packed weights of one dtype, got {dtypes or 'none'}")
    return dtypes.pop()


def _check_recipe(name: str, recipe: LinearRecipe, weight: Any) -> None:
    """Raise ValueError where an engine's weight is not what a prepared one of `recipe` becomes."""
    wanted = (recipe.fprop_weight.narrow.name, recipe.input_name, recipe.contract)
    if not isinstance(weight, PackedTensor):
        raise ValueError(
            f"sync_vllm: {name} is prepared, and in vLLM its weight is {type(weight).__name__}: serve a folder that "
            "aoquant.save_pretrained wrote of a converted copy"
        )
    if (got := (weight.format, weight.activation, weight.contract)) != wanted:
        raise ValueError(
            f"sync_vllm: {name} is prepared as {wanted}, and vLLM serves {got}: save a converted copy anew, and "
            "freeze input scales while rollouts run"
        )
