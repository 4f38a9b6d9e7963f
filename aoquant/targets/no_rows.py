"""Zero rows into torchao's converted layers.

An expert without a token, or the last rank of an uneven batch, has an input without rows. torchao's kernels raise then:
TypeError (int8), ZeroDivisionError (fp8 blocks), IndexError (fp8 per tensor), RuntimeError (NVFP4). A prepared layer
returns an output without rows, and so does nn.Linear. This gives torchao's tensors the same answer.

Most of torchao's classes take F.linear; NVFP4's and MX's meet the matrix product below autograd.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torchao.utils import TorchAOBaseTensor

_MM = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}  # where the input stands


def install() -> None:
    """Let every tensor class of torchao's multiply an input without rows."""
    function = TorchAOBaseTensor.__torch_function__.__func__
    dispatch = TorchAOBaseTensor.__torch_dispatch__.__func__

    @functools.wraps(function)
    def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and cls.__module__.startswith("torchao."):
            x, w = args[0], args[1] if len(args) > 1 else (kwargs or {}).get("weight")
            if _without_rows(x) and isinstance(w, TorchAOBaseTensor):
                return x @ x.new_empty(1, 1).expand(x.shape[-1], w.shape[-2])  # differentiable, and of autocast's dtype
        return function(cls, func, types, args, kwargs)

    @functools.wraps(dispatch)
    def torch_dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MM and cls.__module__.startswith("torchao."):
            x, w = args[_MM[func]], args[_MM[func] + 1]
            if _without_rows(x) and isinstance(w, TorchAOBaseTensor):
                return x.new_empty(x.shape[0], w.shape[1])
        return dispatch(cls, func, types, args, kwargs or {})

    TorchAOBaseTensor.__torch_function__ = classmethod(torch_function)
    TorchAOBaseTensor.__torch_dispatch__ = classmethod(torch_dispatch)


def _without_rows(x: Any) -> bool:
    """Return whether a plain tensor has no rows; False for a size that a compiler does not know."""
    return not isinstance(x, TorchAOBaseTensor) and any(guard_or_false(n == 0) for n in x.shape[:-1])
