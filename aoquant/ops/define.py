"""The boundary of an op: one typed Python function, and the `torch.library` op that is made of its signature.

Callers and bodies speak of operands, encoded matrices and scales, with None for what is missing; PyTorch's dispatcher
knows tensors, numbers and strings (`boundary.py`).

`torch.compile` keeps float32 between fused operations where eager rounds to bf16, which moves scales by an ulp and
codes by one. The registered op is opaque to it and runs the same body, so eager equals compiled by construction.

The dispatcher costs as much as the launch of a kernel, and a training step of a small layer waits for it. So where
nothing watches the dispatcher (ordinary CPU or CUDA tensors, no gradients, compiler or mode), a call goes straight to
the body.

`torch.library.custom_op` would put Python layers of its own between the two, for autograd, views and aliasing checks.
Our ops run inside an `autograd.Function`, so they are defined the plain way: one kernel for every device. `opcheck`, in
the tests, sees that outputs alias nothing.
"""

import functools
import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip

from aoquant.formats import Encoded, Scales

from . import native_step, program, repeat, router
from .boundary import SCHEMA, Arguments, Flat, Result, flat
from .repeat import PLAIN

_LIBRARY = torch.library.Library("aoquant", "FRAGMENT")
# Asking loads the step library. Its kernels of repeated ops must be there before any thread calls an op.
native_step.why_not()
_SIGNATURES: list[str] = [SCHEMA]  # of every op
P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """A function behind the dispatcher: call it like the function. `overload` is the registered op, for compilers and
    tests.
    """

    def __init__(
        self, body: Callable[P, R], fake: Callable[[Any], Any], widths: Callable[..., Sequence[int]], repeated: bool
    ) -> None:
        hints = get_type_hints(body)
        result = hints.pop("return")
        self.__doc__, self.__name__ = body.__doc__, body.__name__
        self.body: Callable[..., R] = body
        self.arguments = Arguments(hints)
        self._defaults = [p.default for p in inspect.signature(body).parameters.values()]
        self._optional = sum(default is not inspect.Parameter.empty for default in self._defaults)
        self._result = Result(result)
        self._fake, self._widths = fake, widths
        self._repeats = repeat.Repeats() if repeated else None
        fields = {name: get_type_hints(named) for name, named in self.arguments.types.items()}
        _SIGNATURES.append(f"{self.__name__}({hints}, {fields}) -> {self._result.schema}")
        schema = f"{self.__name__}({SCHEMA}) -> {self._result.schema}"
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(self.__name__, _unseen(self._registered), "CompositeExplicitAutograd")
        self.overload: Any = getattr(torch.ops.aoquant, self.__name__).default
        torch.library.register_fake(self.overload.name(), self._shapes, lib=_LIBRARY)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        given: Sequence[Any] = args
        if kwargs or len(given) < len(self._defaults):
            given = self._whole(given, kwargs)
        if (
            torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or (_len_torch_dispatch_stack() and not program.recording())
        ):
            return self._dispatched(given)
        for i, at in self.arguments.tensors:  # no function for one of them: this loop stands in front of every kernel
            value = given[i]
            if value is not None and at is not None:
                value = value[at]
            if type(value) is Encoded:
                value = value.codes
            for t in value if type(value) is Scales else (value,):
                if t is not None and not (type(t) in PLAIN and (t.is_cuda or t.is_cpu) and not t.is_neg()):
                    # a subclass, a tensor on meta, or one that torch has yet to negate must meet the dispatcher
                    return self._dispatched(given)
        first = given[0].codes if type(given[0]) is Encoded else given[0]
        if torch.is_autocast_enabled(first.device.type):
            return self._without_autocast(given, first.device.type)
        return self.body(*given)

    def flat(self, *args: P.args, **kwargs: P.kwargs) -> Flat:
        """The registered op's arguments for these."""
        return flat(self._whole(args, kwargs))

    def _dispatched(self, args: Sequence[Any]) -> R:
        return self._result.made(self.overload(*flat(args)), self._widths(*args))

    def _registered(self, *flat: Any) -> Any:
        """The kernel of the registered op, repeated where it can be. Its results alias nothing; those of the function
        may.
        """
        body = functools.partial(self._flat_body, *flat)
        made = body() if self._repeats is None else self._repeated(self._repeats, body, *flat)
        return made[0] if self._result.single else tuple(made)

    def _repeated(self, repeats: repeat.Repeats, body: Any, tensors: Any, numbers: Any, words: str) -> Any:
        made, kind = repeats.repeated(tensors, words, *numbers, router.generation())
        if kind is None:
            return body()
        if made is None:
            return kind(body, tensors)
        if not kind.left_to_library:  # from now on the step library has such calls before Python
            family = repeats.family(kind)
            if family is not None:
                none = kind.program.none or [False] * len(made)
                how = numbers, words, family.number, kind.program.native, none
                native_step.operator("learn_op")(self.overload.name(), *how)
            kind.left_to_library = True
        return made

    def _flat_body(self, *flat: Any) -> Sequence[Tensor | None]:
        args, device = self.arguments.read(*flat), flat[0][0].device.type
        made = self._without_autocast(args, device) if torch.is_autocast_enabled(device) else self.body(*args)
        return _apart(self._result.tensors(made), flat[0])

    def _shapes(self, *flat: Any) -> Any:
        """Return its shapes and dtypes, without data.

        Raises:
            ValueError: some tensors are on meta, and others are not and have values, which nobody would read.
        """
        devices = sorted({str(t.device) for t in flat[0] if type(t) in PLAIN})
        if len(devices) > 1 and "meta" in devices:
            raise ValueError(
                f"the layer's tensors are on {' and '.join(devices)}: those on meta hold no values, so load the checkpoint, or move all to one device"
            )
        return self._result.flat(self._fake(self.arguments.named(self.arguments.read(*flat))))

    def _without_autocast(self, args: Sequence[Any], device: str) -> R:
        """The body, whose caller has cast its inputs."""
        with torch.autocast(device, enabled=False):
            return self.body(*args)

    def _whole(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """All arguments in order, defaults filled in."""
        if not kwargs and len(args) + self._optional >= len(self._defaults):
            return [*args, *self._defaults[len(args) :]]
        rest = zip(self.arguments.names[len(args) :], self._defaults[len(args) :], strict=True)
        whole = [*args, *(kwargs.pop(name, default) for name, default in rest)]
        assert not kwargs and all(value is not inspect.Parameter.empty for value in whole), (
            f"arguments of {self.__name__}"
        )
        return whole


def _unseen(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return `kernel` such that Dynamo does not compile it. Its `disable` costs as much as a call's own Python, and is
    needed where Dynamo watches alone: not inside a compiled graph.
    """
    disabled = torch.compiler.disable(kernel)

    def unseen(*flat: Any) -> Any:
        return kernel(*flat) if get_eval_frame_callback() is None else disabled(*flat)

    skip(unseen)
    return unseen


def schemas() -> str:
    """A number for the signatures of all ops, so that torch's cache returns no graph compiled for others."""
    return f"{zlib.crc32(';'.join(_SIGNATURES).encode()):08x}"


def _first_width(first: Any, *rest: Any) -> tuple[int]:
    return (first.k if type(first) is Encoded else first.shape[-1] if first.dim() else 1,)


def op(
    fake: Callable[[Any], Any], widths: Callable[..., Sequence[int]] = _first_width, *, repeated: bool = False
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Decorator: the op "aoquant::NAME" of a typed function called NAME, which mutates nothing and has a tensor as its
    first argument.

    fake: what the op returns in shapes and dtypes, a function of one namespace that holds the arguments by their names.
    widths: K of each matrix that it encodes, from all arguments in their order; by default the first argument's.
    repeated: whether a call through the dispatcher is repeated without its Python (repeat.py): of an op that each layer
        of a compiled step calls, and whose Python decides by no tensor's values.
    """
    return lambda body: Op(body, fake, widths, repeated)


def _apart(results: Sequence[Tensor | None], given: Sequence[Tensor]) -> list[Tensor | None]:
    """`results`, with a copy of each tensor that is a given one, or an earlier result."""
    taken = set(map(id, given))
    apart: list[Tensor | None] = []
    for t in results:
        apart.append(t.clone() if t is not None and id(t) in taken else t)
        taken.add(id(t))
    return apart
