"""Warn when a model multiplies by a layer's weight itself, as in `F.linear(x, layer.weight)`, past fake quantisation.

The first forward runs under a TorchFunctionMode. A product of a weight, or of a tensor made of one, is a direct read,
unless a layer's own forward is on the stack; norms, casts and penalties are none. What a torch function does not show,
in a custom autograd function or another method than forward, backward shows: the weight gets a gradient before its
layer has run (`checks.note_run`). Models that are compiled, traced, or on attention's fused path, which a mode would
turn off, are not watched. The hooks of a model are plain functions, so that it can be copied and pickled.
"""

import sys
import traceback
import weakref
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from aoquant._messages import warn
from aoquant.linear.checks import unread
from aoquant.linear.kinds import is_packed
from aoquant.linear.prepared import QATLayer

# fmt: off
PRODUCTS = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "einsum", "bilinear",
    "tensordot", "inner", "chain_matmul", "multi_dot", "conv1d", "conv2d", "conv3d", "embedding", "embedding_bag",
    "multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
}
# fmt: on
ADVICE = (
    "that bypasses fake quantisation, and the converted model will compute something else: call the layer instead of reading its weight, or "
    "leave it out of prepare (filter_fn, or None for its name in FqnToConfig)"
)
PACKED_ADVICE = "call the layer instead of reading its weight, or leave it out of quantize_ (filter_fn, or None for its name in FqnToConfig)"


def watch(model: nn.Module, new: Collection[nn.Module]) -> None:
    """Watch the next forward of `model`, or of a child that is called alone, and the first gradients of layers that are
    `new`: other layers may have run, and have their backward to come.
    """
    _take_hooks_away(model)
    for module in (model, *model.children()):
        if not _is_watched(module) and any(_is_watched(m) for m in module.modules()):
            module.register_forward_pre_hook(_begin)
            module.register_forward_hook(_end, always_call=True)
    _watch_gradients(new)


def _watch_gradients(layers: Collection[nn.Module]) -> None:
    """Watch the weights of layers that multiply by the parameter itself, which `note_run` sees."""
    for layer in (m for m in layers if isinstance(m, QATLayer) and type(m).matrix is QATLayer.matrix):
        w, hook = layer.weight, partial(_got_gradient, weakref.ref(layer))
        if w.requires_grad and w.is_leaf and not isinstance(w, DTensor) and id(w) not in unread:
            # The weight keeps its hook alive, and the hook its handle, which leaves `unread` with the weight.
            vars(hook)["handle"] = unread[id(w)] = w.register_post_accumulate_grad_hook(hook)


def _got_gradient(layer_of: weakref.ref[QATLayer], weight: Tensor) -> None:
    """Warn that a weight got a gradient before its layer ran."""
    layer, handle = layer_of(), unread.pop(id(weight), None)
    if handle is None:
        return
    handle.remove()
    if isinstance(layer, QATLayer) and layer.fake_quant and layer._parameters.get("weight") is weight:
        warn(
            f"the weight of {layer.prepared.fqn or 'the layer'} got a gradient although the layer's forward has not run: it is read "
            f"directly; {ADVICE}"
        )


def _is_watched(module: nn.Module) -> bool:
    return isinstance(module, QATLayer) or is_packed(module._parameters.get("weight"))


def _take_hooks_away(model: nn.Module) -> None:
    for module in (model, *model.children()):
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called):
            for key in [key for key, hook in hooks.items() if hook in (_begin, _end)]:
                del hooks[key]


def _begin(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return
    if (watch := _current()) is not None and watch.root() in (None, module):
        watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # interrupted: torch calls no hook then
    elif watch is not None:
        return
    layers = {fqn: m for fqn, m in module.named_modules() if _is_watched(m) and getattr(m, "fake_quant", True)}
    prepared = [m for m in layers.values() if isinstance(m, QATLayer)]
    compiled = any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in module.modules())
    fused = any(isinstance(m, nn.MultiheadAttention) for m in module.modules())
    fused = fused and not (module.training or torch.is_grad_enabled())
    if compiled or not layers or (fused and not prepared):
        _take_hooks_away(module)
    elif not fused:
        _watch_gradients(prepared)
        Watch(module, layers).__enter__()  # type: ignore[no-untyped-call]


def _end(module: nn.Module, args: Any, output: Any) -> None:
    """Warn of what was found, after a forward that did not fail."""
    if torch.compiler.is_compiling() or (watch := _current()) is None or watch.root() is not module:
        return
    watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    if sys.exc_info()[1] is watch.handled:
        _take_hooks_away(module)
        if watch.found:
            warn(f"the weight of {watch.names()} is read directly in forward; {ADVICE}")


class Watch(TorchFunctionMode):
    """See the torch functions of one forward.

    layers: whose weights are watched, by name. found: name of each layer whose float weight went into a product
    outside of it, and the product's. handled: the exception in whose handler the forward is called.
    """

    def __init__(self, root: nn.Module, layers: Mapping[str, Any]) -> None:
        super().__init__()
        self.root, self.layers, self.handled = weakref.ref(root), layers, sys.exc_info()[1]
        self.found: dict[str, str] = {}
        self._packed = {fqn for fqn, layer in layers.items() if is_packed(layer.weight)}
        # Strong references keep ids unique; weak ones would forbid to move packed weights in forward.
        self._parameters: dict[int, tuple[Tensor, Collection[str]]] = {}
        self._made_of = WeakTensorKeyDictionary()
        # A module that is moved or cast in its forward, as Switch-Transformers' router is, reads no weight either.
        forwards = (type(m).forward for m in layers.values())
        self._own = {getattr(function, "__code__", None) for function in (*forwards, nn.Module._apply)}

    def names(self, shown: int = 10) -> str:
        """Return what was found as text."""
        named = [f"{fqn} (by {how})" for fqn, how in self.found.items()]
        return ", ".join(named[:shown]) + (f" and {len(named) - shown} more" if len(named) > shown else "")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = sorted({fqn for t in tree_leaves((args, kwargs)) for fqn in self._layers_of(t)})
        if not read or any(frame.f_code in self._own for frame, _ in traceback.walk_stack(sys._getframe())):
            return func(*args, **kwargs)
        packed = [fqn for fqn in read if fqn in self._packed]
        how = getattr(func, "__name__", "").partition(".")[0]
        try:
            output = func(*args, **kwargs)
        except (NotImplementedError, ValueError) as error:
            if packed:
                error.args = (
                    f"the weight of {', '.join(packed)} is read directly in forward (by {how}), and quantised weights go into F.linear and "
                    f"F.embedding alone: {PACKED_ADVICE}. The error was: {error}",
                )
            raise
        if how in PRODUCTS:
            self.found |= {fqn: how for fqn in read if fqn not in packed and fqn not in self.found}
        else:
            made = {t: read for t in tree_leaves(output) if isinstance(t, Tensor) and not self._layers_of(t)}
            self._made_of.update(made)
        return output

    def _layers_of(self, t: Any) -> Collection[str]:
        if not isinstance(t, nn.Parameter):
            return self._made_of.get(t, ()) if isinstance(t, Tensor) else ()
        if id(t) not in self._parameters:  # FSDP puts other parameters in place for a forward, or none for a moment
            names = [fqn for fqn, layer in self.layers.items() if getattr(layer, "weight", None) is t]
            self._parameters[id(t)] = t, names
        return self._parameters[id(t)][1]


def _current() -> Watch | None:
    return next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, Watch)), None)
