"""Have peft build aoquant's LoRA layers on aoquant's layers.

peft builds its layers from a list of dispatchers; importing aoquant puts one in front of torchao's (see
`_register.py`). Prepare or quantise first, then add adapters; or prepare beneath adapters (`first.py`), while
quantising there is refused. Injecting adapters also gives packed layers of torchao's an input gradient
(`gradients.py`).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from aoquant.distributed.gathered import GatheredWeight
from aoquant.integrations.peft import first, gradients
from aoquant.integrations.peft.first import tell_frozen
from aoquant.integrations.peft.layers import PackedLoraLinear, QATLoraLinear, QATParamWrapper
from aoquant.linear.kinds import is_packed, kind_of
from aoquant.linear.learned_scales import learned_scales
from aoquant.linear.prepared import PreparedModule, QATLayer, QATLinear
from aoquant.planning import adapters
from aoquant.quantize import config_of


def install(module: ModuleType) -> None:
    """Put `dispatch` in front of the torchao dispatcher of `peft.tuners.lora.model`, checks around every tuner's
    injection, and `first` where `quantize_` meets adapters.
    """
    adapters.supports[:] = [first]
    before: Callable[..., nn.Module | None] = module.dispatch_torchao

    def dispatch_torchao(target: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> nn.Module | None:
        return dispatch(target, adapter_name, config, **kwargs) or before(target, adapter_name, config=config, **kwargs)

    module.dispatch_torchao = dispatch_torchao  # type: ignore[attr-defined]
    inject = BaseTuner.inject_adapter

    @functools.wraps(inject)
    def inject_adapter(tuner: BaseTuner, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        learned = {name: scale for name, scale in learned_scales(model).items() if scale.requires_grad}
        with _only_lora(tuner), _named(model):
            inject(tuner, model, *args, **kwargs)
        gradients.mend(model)
        tell_frozen([name for name, scale in learned.items() if not scale.requires_grad])

    BaseTuner.inject_adapter = inject_adapter
    wrap = AuxiliaryTrainingWrapper.__init__

    @functools.wraps(wrap)
    def __init__(self: AuxiliaryTrainingWrapper, module_to_save: nn.Module, adapter_name: str, **kwargs: Any) -> None:
        _check_wrapped(type(self).__name__, module_to_save, kwargs)
        wrap(self, module_to_save, adapter_name, **kwargs)

    AuxiliaryTrainingWrapper.__init__ = __init__


_names: dict[int, str] = {}  # of a model's modules, by id, while adapters are added to it


@contextmanager
def _named(model: nn.Module) -> Iterator[None]:
    """Keep the names of the modules of `model` for the errors of wrappers, which peft tells none."""
    _names.update((id(module), name) for name, module in model.named_modules())
    try:
        yield
    finally:
        _names.clear()


def _check_wrapped(wrapper: str, module: nn.Module, options: dict[str, Any]) -> None:
    """Raise ValueError for a wrapper that reads quantised weights past their layer, or trains what has no values.

    `modules_to_save` trains a copy of a module, so a prepared layer stays one; where peft ties the copy to another
    (`ensure_weight_tying`), it makes a float layer.
    """
    for part, m in module.named_modules():
        prepared = isinstance(m, PreparedModule)
        if not (prepared or any(is_packed(p) for p in m._parameters.values())):
            continue
        fqn = m.prepared.fqn if isinstance(m, QATLayer) else ""
        name = ".".join(filter(None, (_names.get(id(module), ""), part))) or fqn or type(m).__name__
        if wrapper == "TrainableTokensWrapper":
            raise ValueError(
                f"{name}: trainable_token_indices={options.get('token_indices')} trains rows of a weight beside its layer, so a quantised "
                "one would be read as float: leave it out of trainable_token_indices, or out of quantize_"
            )
        if not prepared:
            raise ValueError(
                f"{name}: modules_to_save trains a copy of the module, and packed codes are fixed: prepare the model instead of quantising it, "
                "or leave the module out of modules_to_save"
            )
        if options.get("tied_module") is not None:
            raise ValueError(
                f"{name}: ensure_weight_tying=True makes a float layer of its copy, tied to the embedding's: leave it out, or leave both out "
                "of modules_to_save"
            )


@contextmanager
def _only_lora(tuner: BaseTuner) -> Iterator[None]:
    """Let LoRA alone adapt prepared layers: others add to the output of a rounded weight, and merging changes it."""
    replace = tuner._create_and_replace

    def create_and_replace(config: Any, adapter_name: str, target: nn.Module, *args: Any, **kwargs: Any) -> None:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, QATLayer) and config.peft_type != "LORA":
            raise ValueError(
                f"{base.prepared.fqn}: {config.peft_type.value} has no exact meaning on a prepared layer, its merge would change what was "
                "trained: use LoraConfig, or leave the layer out of target_modules"
            )
        if isinstance(base, QATLayer) and isinstance(base.weight, GatheredWeight):
            raise ValueError(
                f"{base.prepared.fqn}: an adapter is added to the weight, and quantized_model_init packed this one: call masters.restore() first, "
                "or leave the layer out of target_modules"
            )
        try:
            replace(config, adapter_name, target, *args, **kwargs)
        except NotImplementedError as error:  # of a packed tensor, which knows no name
            raise ValueError(
                f"{kwargs.get('current_key') or type(base).__name__}: {config.peft_type.value} computes with the base weight, and a packed "
                f"one has codes: use LoraConfig, or leave the layer out of target_modules ({error})"
            ) from error

    tuner._create_and_replace = create_and_replace
    try:
        yield
    finally:
        del tuner._create_and_replace


def _said_otherwise(config: Any) -> str:
    """Return the end of an advice: peft makes target_parameters of target_modules that mean experts."""
    others = config.target_modules
    if not others or isinstance(others, str):
        return ""
    return (
        f"; target_modules='all-linear', or experts' names there, mean them too: give target_modules={sorted(others)}"
    )


def dispatch(target: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> nn.Module | None:
    """Return the LoRA layer for a layer of ours, None for any other.

    Raises:
        ValueError: an embedding of ours, or an option that has no exact meaning on a quantised layer.
    """
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    name = kwargs.get("target_name", "")
    if (parameter := kwargs.get("parameter_name")) is not None:
        if is_packed(getattr(base, "weight", None)) or is_packed(getattr(base, parameter, None)):
            raise ValueError(
                f"{name}: target_parameters={parameter!r} adapts a packed weight, whose codes are fixed: prepare the model instead of "
                f"quantising it, or leave the parameter out of target_parameters{_said_otherwise(config)}"
            )
        if isinstance(base, PreparedModule) and getattr(base, parameter).dim() < 2:
            raise ValueError(
                f"{name}: target_parameters={parameter!r} has one dimension, and LoRA adapts matrices: leave it out, or train it as it is"
            )
        return (
            QATParamWrapper(target, adapter_name, config=config, **kwargs) if isinstance(base, PreparedModule) else None
        )
    if not (isinstance(base, QATLayer) or config_of(base) is not None):
        return None
    if isinstance(base, nn.Embedding):
        raise ValueError(f"{name}: adapters on a quantised embedding are not supported: leave it out of target_modules")
    if (known := kind_of(base)) is not None and known.transposed:
        raise ValueError(
            f"{name}: adapters on a quantised {known.plain.__name__} are not supported: leave it out of target_modules, or out of quantize_"
        )
    kind = QATLoraLinear if isinstance(base, QATLinear) else PackedLoraLinear
    return kind(target, adapter_name, config=config, **kwargs)
