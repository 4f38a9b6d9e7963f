"""The kinds of layers that can be quantised: for each, the plain class, the prepared class, and how its weight is
stored.

Formats and GEMMs know one layout, W (N, K) with N outputs and K inputs. transformers' Conv1D, the linear layer of
GPT-2, stores (K, N) and multiplies x W; it is the same layer with a transposed weight. Its kind says `transposed`,
and `matrix` turns the weight round wherever a layer is encoded, compared or counted. A converted weight is (N, K)
whatever its float form was, because a row of codes is a row of outputs.

A layer has a kind by its exact class. A subclass may compute something else in its forward, so it has none, but for an
embedding whose class scales, shifts or norms the rows that nn.Embedding gives it (`embedding.why_not_rows`).
Integrations add the kinds of other libraries to `KINDS`, when those libraries are imported.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from aoquant.distributed.fsdp import layer_class
from aoquant.linear.embedding import QATEmbedding, prepared_class, why_not_rows
from aoquant.linear.mastered import MasteredLinear
from aoquant.linear.packed import PackedLinear
from aoquant.linear.prepared import QATLayer, QATLinear


def is_packed(weight: Any) -> bool:
    """Return whether a weight is aoquant's or torchao's quantised tensor."""
    return isinstance(weight, Tensor) and any(c.__module__.startswith("torchao.") for c in type(weight).__mro__)


@dataclass(frozen=True)
class Kind:
    """One kind of layer. gemm: it multiplies activations, as opposed to reading rows. transposed: its float weight is
    (K, N). packed: the class that it has once its weight is a `PackedTensor`; None: `plain`.
    """

    plain: type[nn.Module]
    prepared: type[QATLayer]
    gemm: bool = True
    transposed: bool = False
    packed: type[nn.Module] | None = None

    def matrix(self, weight: Tensor) -> Tensor:
        """Return a float weight as (N, K), a view; a quantised one is so already."""
        return weight.t() if self.transposed and not is_packed(weight) else weight


KINDS = [Kind(nn.Linear, QATLinear, packed=PackedLinear), Kind(nn.Embedding, QATEmbedding, gemm=False)]


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind of a layer, plain, prepared or packed; None for any other module, most subclasses included."""
    cls = layer_class(module)
    if issubclass(cls, MasteredLinear):
        cls = cls.__bases__[-1]
    for kind in KINDS:
        if cls in (kind.plain, kind.prepared, kind.packed):
            return kind
    return _kind_of_embedding(cls) if issubclass(cls, nn.Embedding) else None  # type: ignore[arg-type]


@functools.cache
def _kind_of_embedding(cls: type[nn.Embedding]) -> Kind | None:
    """Return the kind of a subclass of nn.Embedding, plain or prepared."""
    plain = cls.plain if issubclass(cls, QATEmbedding) else cls
    return None if why_not_rows(plain) else Kind(plain, prepared_class(plain), gemm=False)


def why_no_kind(module: nn.Module) -> str:
    """Return why a subclass of a layer has no kind, and is left alone."""
    if isinstance(module, nn.Embedding) and (reason := why_not_rows(layer_class(module))) is not None:  # type: ignore[arg-type]
        return reason
    plain = next(k.plain.__name__ for k in KINDS if isinstance(module, k.plain))
    return f"{type(module).__name__} is a subclass of {plain}, whose forward may differ"


def is_layer(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer or an embedding, or a subclass of one, which is named but left
    alone.
    """
    return isinstance(module, tuple(kind.plain for kind in KINDS))


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer, or a subclass of one."""
    return isinstance(module, tuple(kind.plain for kind in KINDS if kind.gemm))


def matrix_of(module: nn.Module) -> Any:
    """Return a layer's weight as (N, K); None for a module without one."""
    weight, kind = getattr(module, "weight", None), kind_of(module)
    return weight if weight is None or kind is None else kind.matrix(weight)
