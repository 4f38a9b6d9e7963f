"""torchao's steps of its GPTQConfig, AWQConfig and SmoothQuantConfig, as `aoquant.quantize_` takes them.

    quantize_(model, AWQConfig(base, step="prepare"))   # from now on the model keeps what it is called with
    for batch in batches: model(batch)
    quantize_(model, AWQConfig(base, step="convert"))   # calibrate_ptq with these batches

torchao observes each layer's input, and leaves a scale that multiplies activations at run time. Here scales are folded,
so the result is what `base` alone makes, and a model to load such weights into is made by `base`.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from aoquant.config import named
from aoquant.planning.choose import Filter
from aoquant.planning.plan import plan
from aoquant.ptq.calibrate_config import CalibrateConfig
from aoquant.ptq.sequential import calibrate_ptq
from aoquant.quantize import RECORDER, quantize_


class Recorder:
    """A hook that keeps a model's calls. config: the name of torchao's. asked, filter_fn: of the first step.

    Meanwhile `model.generate` makes no cache, so that each of its calls has the whole sequence and can be repeated.
    """

    def __init__(self, config: str, asked: CalibrateConfig, filter_fn: Filter | None) -> None:
        self.config, self.asked, self.filter_fn, self.batches = config, asked, filter_fn, list[Any]()
        self.handle: Any = None
        self.use_cache: Any = None

    def attach(self, model: nn.Module) -> None:
        """Keep the calls of a model from now on."""
        vars(model)[RECORDER] = self
        self.handle = model.register_forward_pre_hook(self, with_kwargs=True)
        if (generation := getattr(model, "generation_config", None)) is not None:
            self.use_cache, generation.use_cache = generation.use_cache, False

    def detach(self, model: nn.Module) -> None:
        """Keep no further calls."""
        self.handle.remove()
        del vars(model)[RECORDER]
        if (generation := getattr(model, "generation_config", None)) is not None:
            generation.use_cache = self.use_cache

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if any("Cache" in type(value).__name__ for value in (*args, *kwargs.values())):
            raise ValueError(
                f"{type(model).__name__}: it is called with a cache, which changes, so this call cannot be repeated: calibrate on calls "
                "without one, such as model(input_ids) or model.generate(input_ids, use_cache=False)"
            )
        given = args
        if kwargs:
            signature = inspect.signature(model.forward)
            bound = signature.bind(*args, **kwargs).arguments
            kinds = {name: signature.parameters[name].kind for name in bound}
            if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY} & {*kinds.values()}:
                raise ValueError(f"{type(model).__name__}: call it with keyword arguments alone while it is observed")
            given = {k: v for k, v in bound.items() if kinds[k] is not inspect.Parameter.VAR_KEYWORD} | kwargs
        batch = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, given)
        if self.batches and _continues(self.batches[-1], batch):
            self.batches.pop()
        self.batches.append(batch)


def _continues(before: Any, now: Any) -> bool:
    """Return whether a call has the tokens of the call before and one more, as `generate` calls a model."""
    a, b = (batch.get("input_ids") if isinstance(batch, dict) else None for batch in (before, now))
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == 2):
        return False
    return b.shape == (len(a), a.shape[1] + 1) and torch.equal(b[:, :-1], a)


def take_step(
    model: nn.Module, config: Any, filter_fn: Filter | None, device: torch.device | str | None, skip_incompatible: bool
) -> None:
    """Take the step that `config` names.

    Raises:
        ValueError: the step is unknown, or convert before prepare; or as `calibrate_ptq`.
    """
    step, name = config.step, type(config).__name__
    recorder: Recorder | None = vars(model).get(RECORDER)
    asked = recorder.asked if recorder is not None and config.base_config is None else CalibrateConfig.of(config)
    if step in ("prepare", "observe"):
        plan(model, named(asked.recipe), filter_fn, skip_incompatible=skip_incompatible)
        if recorder is not None:
            recorder.detach(model)
        Recorder(name, asked, filter_fn).attach(model)
    elif step == "prepare_for_loading":
        quantize_(model, asked.recipe, filter_fn, device, skip_incompatible=skip_incompatible)
        return
    elif recorder is None:
        raise ValueError(
            f"{name}(step={step!r}): nothing is prepared: give step='prepare', run the model, and convert it then"
        )
    elif step == "convert":
        if filter_fn is not None:
            raise ValueError(f"{name}(step='convert'): layers are chosen by step='prepare': give filter_fn to that one")
        recorder.detach(model)
        try:
            calibrate_ptq(
                model, recorder.batches, asked, filter_fn=recorder.filter_fn, skip_incompatible=skip_incompatible
            )
        except BaseException:
            recorder.attach(model)
            raise
    elif step != "prepare_for_smoothquant_smoothing_factor":  # which a fold finds when it converts
        raise ValueError(f"{name}: step {step!r} is not taken: give 'prepare' or 'convert'")
    if device is not None:
        model.to(device)
