"""Modules that were prepared and are replaced before convert: it says what stays float, and strict raises."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import NARROW, everything, llama
from support.moe_models import model_of
from torch import nn
from torchao.quantization import FqnToConfig
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from aoquant import AoquantWarning, PackedTensor, QATConfig, get_recipe, quantize_, unpack_, unprepare

SAID = "replaced or removed since"
CONVERT = QATConfig(step="convert")


def prepared(tied: bool = False, chosen: Any = everything) -> LlamaForCausalLM:
    """Embedding and head too."""
    model = llama(tied, attention_bias=False, **NARROW)
    quantize_(model, QATConfig("int4-g32"), chosen)
    return model


def silently(model: Any, config: Any = CONVERT, chosen: Any = None) -> None:
    with warnings.catch_warnings(action="error"):
        quantize_(model, config, chosen, strict=True)


def resize(model: Any) -> None:
    model.resize_token_embeddings(160)


def put(name: str, make: Callable[[Any], nn.Module]) -> Callable[[Any], None]:
    return lambda model: model.set_submodule(name, make(model))


def linear(model: Any) -> nn.Module:
    return nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)


def embedding(model: Any) -> nn.Module:
    return nn.Embedding(160, 64, dtype=torch.bfloat16)


CHANGES: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "resized": (resize, ["lm_head (now a float Linear)"]),
    "an embedding": (put("model.embed_tokens", embedding), ["model.embed_tokens (now a float Embedding)"]),
    "a head for other classes": (put("lm_head", linear), ["lm_head (now a float Linear)"]),
    "a layer": (put("model.layers.1.self_attn.o_proj", linear), ["model.layers.1.self_attn.o_proj (now a float Linear)"]),
    "a block": (put("model.layers.0.mlp", lambda m: LlamaMLP(m.config)), ["model.layers.0.mlp (now a float LlamaMLP)"]),
    "factors": (
        put("model.layers.0.mlp.up_proj", lambda m: nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 96))),
        ["model.layers.0.mlp.up_proj (now a float Sequential)"],
    ),
    "removed": (lambda m: delattr(m, "lm_head"), ["lm_head (removed)"]),
    "a shorter stack": (lambda m: m.model.layers.__delitem__(1), ["model.layers.1 (removed)"]),
    "an empty stack": (put("model.layers", lambda m: nn.ModuleList()), ["model.layers (now an empty ModuleList)"]),
    "a stack without layers": (lambda m: m.model.layers.__delitem__(slice(None)), ["model.layers.0 (removed)", "model.layers.1 (removed)"]),
    "a block without linear layers": (put("model.layers.0.mlp", lambda m: nn.Sequential()), ["model.layers.0.mlp (now an empty Sequential)"]),
    "all layers of a block": (
        lambda m: [put(f"model.layers.0.mlp.{n}_proj", linear)(m) for n in ("up", "down", "gate")],
        [f"model.layers.0.mlp.{n}_proj (now a float Linear)" for n in ("up", "down", "gate")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("chosen", [everything, lambda m, name: isinstance(m, nn.Linear)], ids=["all", "linear"])
@pytest.mark.parametrize("change", CHANGES)
def test_convert_names_what_is_not_there_any_more(change: str, chosen: Any) -> None:
    """And strict leaves the model as it is; a list of blocks is named, too, above which nothing is prepared."""
    model = prepared(chosen=chosen)
    alter, names = CHANGES[change]
    if chosen is not everything and "Embedding" in names[0]:
        return
    alter(model)
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=f"^strict: {len(names)} .*{SAID}") as error:
        quantize_(model, CONVERT, strict=True)
    assert all(name in str(error.value) for name in names)
    assert [type(m) for m in model.modules()] == classes
    with pytest.warns(AoquantWarning, match=SAID) as said:
        quantize_(model, CONVERT)
    text = next(str(w.message) for w in said if SAID in str(w.message))
    assert text.startswith(f"{len(names)} module(s)") and all(name in text for name in names)


@pytest.mark.parametrize(
    "wrapped",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: nn.ModuleDict({"inner": m}), nn.DataParallel],
    ids=["copied", "pickled", "beneath another module", "wrapped"],
)
def test_the_record_goes_along(wrapped: Callable[[Any], nn.Module]) -> None:
    model = wrapped(prepared())
    inner = next(m for m in model.modules() if isinstance(m, LlamaForCausalLM))
    resize(inner)
    with pytest.warns(AoquantWarning, match=r"1 module.* \S*lm_head \(now a float Linear\)"):
        quantize_(model, CONVERT)


def test_a_part_of_a_model_has_its_own_record() -> None:
    model = prepared()
    resize(model)
    put("model.embed_tokens", embedding)(model)
    with pytest.warns(AoquantWarning, match=r"1 module.*: embed_tokens \(now a float Embedding\)"):
        quantize_(model.model, CONVERT)


def test_a_tied_pair_that_was_resized_stays_prepared() -> None:
    model = prepared(tied=True)
    resize(model)
    silently(model)
    assert isinstance(model.lm_head.weight, PackedTensor) and model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("unpacked", [False, True], ids=["prepared", "unpacked"])
def test_stacked_experts(unpacked: bool) -> None:
    model, other = model_of("qwen3-moe"), model_of("qwen3-moe")
    quantize_(model, "mxfp4-experts" if unpacked else get_recipe("mxfp4-experts").prepare())
    if unpacked:
        unpack_(model)
    model.model.layers[1].mlp.experts = other.model.layers[1].mlp.experts
    with pytest.warns(AoquantWarning, match=r"model\.layers\.1\.mlp"):
        quantize_(model, CONVERT)


def merged(model: Any) -> Any:
    """Adapters that were put on prepared layers and merged into them."""
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"])).merge_and_unload()


def prepared_again(model: Any) -> Any:
    resize(model)
    quantize_(model, QATConfig("int4-g32"), lambda m, name: name == "lm_head")
    return model


def in_two_steps(model: Any) -> Any:
    quantize_(model, CONVERT, lambda m, name: "mlp" in name)
    return model


def started_anew(model: Any) -> Any:
    unprepare(model)
    resize(model)
    quantize_(model, QATConfig("int4-g32"))
    return model


@pytest.mark.parametrize("way", [merged, prepared_again, in_two_steps, started_anew, copy.deepcopy])
def test_nothing_is_said_where_everything_is_there(way: Callable[[Any], Any]) -> None:
    model = way(prepared())
    silently(model)


def test_what_a_filter_or_a_name_leaves_out_is_known() -> None:
    both = ("lm_head", "model.embed_tokens")
    for config, chosen in (
        (CONVERT, lambda m, name: everything(m, name) and name not in both),
        (FqnToConfig({"_default": CONVERT} | dict.fromkeys(both)), None),
        (FqnToConfig({"_default": CONVERT, "re:(lm_head|model.embed_tokens)": None}), None),
    ):
        model = prepared()
        resize(model)
        silently(model, config, chosen)


def test_a_convert_forgets() -> None:
    """A head that is replaced after convert is nothing to the next training."""
    model = prepared()
    quantize_(model, CONVERT)
    model.lm_head = nn.Linear(64, 32, dtype=torch.bfloat16)
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 96, dtype=torch.bfloat16)
    quantize_(model, QATConfig("int4-g32"), lambda m, name: name == "model.layers.0.mlp.up_proj")
    silently(model)


def test_convert_says_that_all_is_gone() -> None:
    model = prepared(chosen=None)
    model.model.layers = nn.ModuleList([])
    with pytest.raises(ValueError, match=r"nothing to convert: .*replaced or removed since: model\.layers\."):
        quantize_(model, CONVERT)
