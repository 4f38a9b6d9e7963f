"""Weights that are read outside their layer: noticed in the first forward after prepare, and after convert.

A prepared layer quantises in its own forward. A model that takes the weight and multiplies by it itself, as in
`F.linear(x, layer.weight)` or Mamba's `dt_proj.weight @ x`, computes float numbers in training and, after convert,
other numbers or an error. Nothing about the layer shows that, but the first forward does:

- A TorchFunctionMode sees every torch function of that forward. Products (`PRODUCTS`) that get a prepared weight, or
  a tensor made of one, outside a prepared layer's forward are direct reads. Whether a call comes from a prepared
  layer's own forward is read off the stack.
- What the mode cannot see, such as a custom autograd function that is handed the weight, shows in backward: a layer
  whose forward did not run has a weight that gets a gradient. Only layers that did not run in the first forward are
  watched for that, until they run. Where another method than forward is called first, `gradient_watch.py` looks.
- A packed weight is multiplied by F.linear and looked up by F.embedding, wherever they stand. Any other function of it
  raises, without a layer's name if the tensor is torchao's. So the mode adds the name to that error.

`reads` looks for the same reads in a float model, before anything is done to it.

Reading a weight is no direct read: only products are, so norms, penalties, casts, copies between devices and all that
optimizers, FSDP, accelerate and peft do between products pass.

The watch is a forward pre-hook of the model and of its children, a plain function, so that modules can be copied and
pickled. The first of them that is called starts the watch and takes all of them away, and an error in that forward
puts them back. So later steps pay nothing. Nothing is watched while a compiler or a tracer runs, nor in a model with
compiled parts, whose guards would see the mode. nn.MultiheadAttention, too, sees the mode, and leaves its fused path
for another with other roundings: a model that has one is watched when it trains.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from aoquant._warning import AoquantWarning
from aoquant.layers import gradient_watch
from aoquant.layers.kinds import is_packed
from aoquant.layers.qat import QATLayer, QATLinear

# fmt: off
PRODUCTS = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm",
    "einsum", "tensordot", "inner", "bilinear", "chain_matmul", "multi_dot", "conv1d", "conv2d", "conv3d",
    "embedding", "embedding_bag", "multi_head_attention_forward", "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
}
# fmt: on
PACKED_ADVICE = "call the layer instead of reading its weight, or leave it out of quantize_ (filter_fn, or None for its name in FqnToConfig)"
SHOWN = 10  # names in a warning
_MOVED = nn.Module._apply.__code__  # of `.to()`, which Switch-Transformers' router calls in every forward


class _Running(threading.local):
    """The watches of the forwards that run in this thread: one, or none."""

    def __init__(self) -> None:
        self.watches: list[_Watch] = []


_running = _Running()
_late: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()


def watch(model: nn.Module, new: Collection[nn.Module]) -> None:
    """Watch the next forward of `model`, or of one of its children, whichever is called first; and the first gradients
    of layers that are `new`: others may have run, and have their backward to come.
    """
    _take_hooks_away(model)
    for module in (model, *model.children()):
        if not _is_watched(module) and any(_is_watched(m) for m in module.modules()):
            module.register_forward_pre_hook(_begin)
    for layer in new:
        if (
            isinstance(layer, QATLinear) and type(layer).matrix is QATLayer.matrix
        ):  # it multiplies by the parameter itself
            gradient_watch.watch(layer)


def _is_watched(module: nn.Module) -> bool:
    return isinstance(module, QATLayer) or is_packed(module._parameters.get("weight"))


def reads(model: nn.Module, layers: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, str]:
    """The layers, of those that are given by name, whose float weights go into products outside of them while `run`
    runs `model`: name to the product's name.
    """
    with _Watch(model, layers) as mode:
        run()
    return mode.found


def forget(model: nn.Module) -> None:
    """Take the hooks of `watch` away."""
    gradient_watch.forget(model)
    _take_hooks_away(model)


def _take_hooks_away(model: nn.Module) -> None:
    for module in (model, *model.children()):
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _begin]:
            del module._forward_pre_hooks[key]


def _begin(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: start to watch this forward."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return
    layers = {fqn: m for fqn, m in module.named_modules() if _is_watched(m) and getattr(m, "fake_quant", True)}
    if not (module.training or torch.is_grad_enabled()) and any(
        isinstance(m, nn.MultiheadAttention) for m in module.modules()
    ):
        if not any(isinstance(m, QATLayer) for m in layers.values()):
            forget(module)
        return
    while _running.watches and _running.watches[-1].root() in (None, module):  # of a forward that was interrupted
        _running.watches.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
    forget(module)
    if _running.watches or any(
        getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in module.modules()
    ):
        return
    if layers:
        mode = _Watch(module, layers)
        module.register_forward_hook(_end, always_call=True)
        _running.watches.append(mode)
        mode.__enter__()  # type: ignore[no-untyped-call]


def _end(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook, called after errors too: stop, and say what was found."""
    failed = (
        sys.exc_info()[0] is not None
    )  # torch iterates over the hooks then, so this one stays until a forward ends well
    if not failed:
        for key in [key for key, hook in module._forward_hooks.items() if hook is _end]:
            del module._forward_hooks[key]
            module._forward_hooks_always_called.pop(key, None)
    if not (_running.watches and _running.watches[-1].root() is module):
        return
    mode = _running.watches.pop()
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    if failed:
        module.register_forward_pre_hook(_begin)
        return
    if mode.found:
        names = [f"{fqn} (by {how})" for fqn, how in mode.found.items()]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        warnings.warn(
            f"the weight of {', '.join(names[:SHOWN])}{more} is read directly in forward; {gradient_watch.ADVICE}",
            AoquantWarning,
            stacklevel=2,
        )
    for layer in mode.not_run():
        _watch_gradient(layer)


class _Weight(NamedTuple):
    """A weight, which it keeps alive, and the names of its layers."""

    tensor: Tensor
    layers: list[str]


class _Watch(TorchFunctionMode):
    """Sees the torch functions of one forward. found: name of each layer whose weight, if not packed, went into a
    product outside, and the product.
    """

    def __init__(self, root: nn.Module, layers: Mapping[str, Any]) -> None:
        super().__init__()
        self.root: weakref.ref[nn.Module] = weakref.ref(root)
        self.layers = layers
        self.found: dict[str, str] = {}
        self._ran: set[int] = set()
        self._weights: dict[int, _Weight] = {}
        self._others: set[int] = set()
        self._made_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._codes = {cls.forward.__code__ for cls in _subclasses(QATLayer)}
        self._codes |= {type(m).forward.__code__ for m in layers.values() if isinstance(type(m).forward, FunctionType)}
        self._codes.add(_MOVED)
        self._packed = {fqn for fqn, m in layers.items() if is_packed(m.weight)}
        self._find_weights()

    def not_run(self) -> list[QATLayer]:
        """Layers whose forward did not run, whose weight no other layer that ran holds, and that are not in `found`."""
        used = {id(layer.weight) for fqn, layer in self.layers.items() if id(layer) in self._ran or fqn in self.found}
        prepared = [layer for layer in self.layers.values() if isinstance(layer, QATLayer)]
        return [layer for layer in prepared if id(layer.weight) not in used]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = {fqn for t in _tensors((*args, *kwargs.values())) for fqn in self._layers_of(t)}
        if not names:
            return func(*args, **kwargs)
        if self._in_own_forward():
            return func(*args, **kwargs)
        how = getattr(func, "__name__", "").partition(".")[0]
        try:
            output = func(*args, **kwargs)
        except (NotImplementedError, ValueError) as error:
            if not (packed := sorted(names & self._packed)):
                raise
            kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
            raise kind(
                f"the weight of {', '.join(packed)} is read directly in forward (by {how}), and quantised weights go into F.linear and "
                f"F.embedding alone: {PACKED_ADVICE}. The error was: {error}"
            ) from error
        if how in PRODUCTS:
            for fqn in sorted(names - self._packed):
                self.found.setdefault(fqn, how)
        else:
            for t in _tensors((output,)):
                if not self._layers_of(t):
                    self._made_of[t] = tuple(names)
        return output

    def _find_weights(self) -> None:
        self._weights = {}
        for fqn, layer in self.layers.items():
            self._weights.setdefault(id(layer.weight), _Weight(layer.weight, [])).layers.append(fqn)

    def _layers_of(self, t: Tensor) -> Iterable[str]:
        """Names of the layers whose weight `t` is, or is made of. FSDP puts other parameters in place for a forward:
        they are looked up again.
        """
        if isinstance(t, nn.Parameter):
            if id(t) not in self._weights and id(t) not in self._others:
                self._find_weights()
                if id(t) not in self._weights:
                    self._others.add(id(t))
            return self._weights[id(t)].layers if id(t) in self._weights else ()
        return self._made_of.get(t, ()) if self._made_of else ()

    def _in_own_forward(self) -> bool:
        """Whether a layer's own forward is on the stack; which layer's is noted. A module that is moved or cast reads
        no weight, either, and torch swaps its tensors, which nothing may watch then.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code not in self._codes:
            frame = frame.f_back
        if frame is not None and frame.f_code is not _MOVED:
            self._ran.add(id(frame.f_locals.get("self")))
        return frame is not None


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among `values`, and in their lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _watch_gradient(layer: QATLayer) -> None:
    """Warn when the weight of a layer gets a gradient before the layer's forward runs."""
    weight = layer.weight
    if not (weight.requires_grad and weight.is_leaf) or isinstance(weight, DTensor) or layer in _late:
        return
    found = weakref.ref(layer)

    def got_gradient(weight: Tensor) -> None:
        layer = found()
        if layer is None or layer not in _late:
            return
        _forget_gradient(layer)
        if isinstance(layer, QATLayer) and layer.weight is weight:
            warnings.warn(
                f"the weight of {layer.prepared.fqn or 'the layer'} got a gradient although the layer's forward has not run: it is read "
                f"directly; {gradient_watch.ADVICE}",
                AoquantWarning,
                stacklevel=2,
            )

    _late[layer] = weight.register_post_accumulate_grad_hook(got_gradient)
    layer.register_forward_pre_hook(_runs)


def _runs(module: nn.Module, args: Any) -> None:
    """Forward pre-hook of a layer that did not run at first: it does, so its gradient is its own."""
    if not torch.compiler.is_compiling():
        _forget_gradient(module)


def _forget_gradient(layer: nn.Module) -> None:
    if (handle := _late.pop(layer, None)) is not None:
        handle.remove()
    for key in [key for key, hook in layer._forward_pre_hooks.items() if hook is _runs]:
        del layer._forward_pre_hooks[key]
