"""Subclasses of nn.Embedding and nn.Linear in transformers: each is quantised exactly, or left alone with its cause.

An embedding whose class takes its rows from `super().forward` computes the same prepared, converted, and as the plain
class over the dequantised weight.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from aoquant import QATConfig, quantize_, set_fake_quant, unprepare
from aoquant.linear.embedding import QATEmbedding, why_not_rows
from aoquant.linear.kinds import kind_of

IDS = torch.tensor([[1, 2, 3, 7], [5, 5, 0, 63]])
# by the names that transformers gives to arguments
MADE_WITH = {
    "num_embeddings": 64, "num_positions": 64, "embedding_dim": 64, "padding_idx": 1, "embed_scale": 8.0, "norm_eps": 1e-6,
    "config": SimpleNamespace(max_position_embeddings=64, hidden_size=64, pad_token_id=1),
}  # fmt: skip
CALLED_WITH = {
    "input_ids": IDS, "input": IDS, "visual_tokens": IDS, "input_ids_shape": IDS.shape, "inputs_shape": IDS.shape,
    "attention_mask": torch.ones_like(IDS), "device": torch.device("cpu"),
}  # fmt: skip
REFUSED = {
    "IdeficsDecoupledEmbedding": "F.embedding(input_ids, self.weight)",
    "Ovis2VisualEmbeddingTable": "torch.matmul(visual_tokens, self.weight)",
    "SinusoidalPositionalEmbedding": "self.weight = nn.Parameter(weight)",
    "WhisperPositionalEmbedding": "self.weight[",
}


def subclasses_of(plain: type[nn.Module]) -> dict[str, type[nn.Module]]:
    """Every subclass of `plain` that a modeling file of transformers defines, by its name."""
    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        names = re.findall(rf"^class (\w+)\([^)]*{plain.__name__}\b", file.read_text(encoding="utf-8"), re.MULTILINE)
        if names:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            classes = (getattr(module, name) for name in names)
            found |= {c.__name__: c for c in classes if issubclass(c, plain)}
    return found


def call(function: Any, values: dict[str, Any]) -> Any:
    """Call with every argument that `values` has, first those that stand without a default."""
    wanted = inspect.signature(function).parameters.values()
    return function(**{p.name: values[p.name] for p in wanted if p.default is p.empty or p.name == "attention_mask"})


def rows(module: nn.Module) -> torch.Tensor:
    y = call(module.forward, CALLED_WITH)
    return y[0] if isinstance(y, tuple) else y


def chosen(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Embedding)


def holder(module: nn.Module) -> nn.Module:
    model = nn.Module()
    model.embed = module
    return model


def test_every_embedding_class_is_exact_or_refused_with_its_cause() -> None:
    classes = subclasses_of(nn.Embedding)
    assert len(classes) > 45
    assert {name for name, c in classes.items() if why_not_rows(c)} == set(REFUSED)
    for name, cls in classes.items():
        torch.manual_seed(0)
        values = {**MADE_WITH, "num_additional_embeddings": 0}
        given = {n: values[n] for n in inspect.signature(cls).parameters if n in values}
        model = holder(cls(**given)).eval()
        layer: Any = model.embed
        plain = copy.deepcopy(layer)
        if name in REFUSED:
            with pytest.warns(match=re.escape(REFUSED[name])), pytest.raises(ValueError, match="nothing to"):
                quantize_(model, QATConfig("int8-weight", step="prepare"), chosen)
            assert type(layer) is cls
            continue
        quantize_(model, QATConfig("int8-weight", step="prepare"), chosen)
        assert isinstance(layer, cls) and isinstance(layer, QATEmbedding), name
        prepared = rows(layer)
        set_fake_quant(model, False)
        assert torch.equal(rows(layer), rows(plain)), name
        set_fake_quant(model, True)
        quantize_(model, QATConfig(step="convert"))
        assert type(layer) is cls and torch.equal(rows(layer), prepared), name
        assert not torch.equal(prepared, rows(plain)), name
        with torch.no_grad():
            plain.weight.copy_(layer.weight.dequantize())
        assert torch.equal(rows(plain), prepared), name


def test_every_linear_subclass_is_left_alone_by_name() -> None:
    classes = subclasses_of(nn.Linear)
    assert {"FalconLinear", "EsmFoldLinear", "IdeficsDecoupledLinear"} <= set(classes)
    for name, cls in classes.items():
        layer = nn.Linear(64, 64)
        layer.__class__ = cls
        assert kind_of(layer) is None, name
        model = nn.Sequential(nn.Linear(64, 64), layer)
        with pytest.warns(match=rf"1 \({name} is a subclass of Linear"):
            quantize_(model, "int8-weight", lambda m, fqn: isinstance(m, nn.Linear))
        assert type(layer) is cls and type(layer.weight) is nn.Parameter, name


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 3.0


class Named(Scaled):
    """No forward of its own."""


class Direct(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.Embedding.forward(self, input) * 3.0


class Behind(nn.Embedding):
    def rows(self, input: torch.Tensor) -> torch.Tensor:
        return self.weight[input]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.rows(input)


class Looked(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + getattr(self, "weight")[0]  # noqa: B009


class Other(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1)


@pytest.mark.parametrize(
    ("cls", "cause"),
    [
        (Direct, "nn.Embedding.forward"),
        (Behind, r"self\.weight\[input\]"),
        (Looked, "'weight'"),
        (Other, "does not call"),
    ],
)
def test_forwards_that_read_the_weight_in_another_way_are_refused(cls: type[nn.Embedding], cause: str) -> None:
    model = holder(cls(64, 64))
    with pytest.warns(match=cause), pytest.raises(ValueError, match="nothing to"):
        quantize_(model, "int8-weight", chosen)


def test_a_tied_class_that_cannot_is_the_reason() -> None:
    model = holder(Behind(64, 64))
    model.head = nn.Linear(64, 64, bias=False)
    model.head.weight = model.embed.weight
    with (
        pytest.warns(match="left alone"),
        pytest.raises(ValueError, match=r"embed cannot be quantised: Behind\.rows reads"),
    ):
        quantize_(model, "int8-weight", lambda m, fqn: True)


@pytest.mark.parametrize("cls", [Scaled, Named])
def test_a_prepared_subclass_trains_copies_pickles_and_goes_back(cls: type[nn.Embedding]) -> None:
    torch.manual_seed(0)
    model = holder(cls(64, 64, padding_idx=0))
    layer: Any = model.embed
    quantize_(model, QATConfig("int4-g32", step="prepare"), chosen)
    before = layer(IDS)
    before.square().sum().backward()
    assert layer.weight.grad[0].abs().max() == 0 and layer.weight.grad[7].abs().max() > 0
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(again.embed) is type(layer) and torch.equal(again.embed(IDS), before)
    compiled = torch.compile(copy.deepcopy(layer), backend="eager", fullgraph=True)
    assert torch.equal(compiled(IDS), before)
    back = copy.deepcopy(model)
    unprepare(back)
    assert type(back.embed) is cls
    quantize_(model, QATConfig(step="convert"))
    assert type(layer) is cls and torch.equal(layer(IDS), before)
