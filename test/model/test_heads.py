"""Output heads stay float by default: everything behind the body of a Hugging Face model, whatever it is called."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.export_families import config_of
from torch import nn
from torchao.quantization import FqnToConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

import aoquant
from aoquant import AoquantWarning, IntxWeightConfig, PackedTensor, QATConfig, quantize_
from aoquant.cli import main
from aoquant.linear.kinds import is_linear

GOLDEN = Path(__file__).parents[1] / "golden" / "heads-3c4a190.tar.xz"
SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 16,
    "image_size": 32,
    "patch_size": 16,
}
SCORES = (AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering)
BASE = IntxWeightConfig(4, 32)


def config(name: str, **more: Any) -> PretrainedConfig:
    return getattr(transformers, f"{name}Config")(**(SIZE | more))


# configs of families whose other models are not exported
CONFIGS: dict[str, PretrainedConfig] = {
    "electra": config("Electra", embedding_size=32),
    "distilbert": transformers.DistilBertConfig(dim=32, hidden_dim=64, n_layers=1, n_heads=2, vocab_size=16),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=16, bos_token_id=1, eos_token_id=2),
    "deberta": config("DebertaV2"),
    "swin": transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=32, depths=[1], num_heads=[1], window_size=4),
}  # fmt: skip
LM, IMAGE, AUDIO = AutoModelForCausalLM, AutoModelForImageClassification, transformers.AutoModelForAudioClassification
# family, the auto classes, and the names that begin the float linears
FAMILIES: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "llama": ((LM, *SCORES), ("lm_head", "score", "qa_outputs")),
    "qwen2": ((LM, *SCORES), ("lm_head", "score", "qa_outputs")),
    "bert": ((AutoModelForMaskedLM, *SCORES), ("cls", "classifier", "qa_outputs")),
    "roberta": ((AutoModelForMaskedLM, *SCORES), ("lm_head", "classifier", "qa_outputs")),
    "electra": (SCORES, ("classifier", "qa_outputs")),
    "distilbert": ((AutoModelForMaskedLM, *SCORES), ("vocab_", "pre_classifier", "classifier", "qa_outputs")),
    "gpt2": (SCORES, ("score", "classifier", "qa_outputs")),
    "opt": ((LM, SCORES[0]), ("lm_head", "score")),
    "deberta": (SCORES, ("pooler", "classifier", "qa_outputs")),
    "t5": (SCORES, ("classification_head", "classifier", "qa_outputs")),
    "vit": ((IMAGE,), ("classifier",)),
    "swin": ((IMAGE,), ("classifier",)),
    "clip": ((IMAGE,), ("classifier",)),
    "whisper": ((AUDIO,), ("projector", "classifier")),
}


def linears(model: nn.Module) -> dict[str, bool]:
    """Return whether each linear layer is prepared, by name."""
    return {fqn: hasattr(m, "prepared") for fqn, m in model.named_modules() if is_linear(m)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_of_any_task_is_float_and_the_body_is_not(family: str) -> None:
    autos, names = FAMILIES[family]
    made = CONFIGS[family] if family in CONFIGS else config_of(family)
    for auto in autos:
        with torch.device("meta"):
            model = auto.from_config(made)
        quantize_(model, QATConfig(BASE), skip_incompatible=True)
        found = linears(model)
        heads = {fqn for fqn in found if fqn.startswith(names)}
        assert heads, (type(model).__name__, list(found))
        assert {fqn for fqn, prepared in found.items() if not prepared} == heads, type(model).__name__
        told = {name: w.about for w in aoquant.coverage(model).float_weights for name in w.names}
        assert all(told[f"{fqn}.weight"].startswith(("the output head", "an embedding and")) for fqn in heads)


def sequence_classifier(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(config("Llama", num_labels=3, **more)).eval()


@pytest.mark.parametrize(
    "chosen",
    [
        {"filter_fn": lambda m, fqn: isinstance(m, nn.Linear)},
        {"config": FqnToConfig({"score": BASE, "_default": BASE})},
        {"config": FqnToConfig({"re:.*score": BASE})},
        {"config": QATConfig(BASE), "filter_fn": lambda m, fqn: isinstance(m, nn.Linear)},
    ],
    ids=["filter", "name", "pattern", "prepared"],
)
def test_a_name_or_a_filter_picks_a_head(chosen: dict[str, Any]) -> None:
    model = sequence_classifier()
    quantize_(model, **({"config": BASE} | chosen))
    if isinstance(chosen.get("config"), QATConfig):
        quantize_(model, QATConfig(step="convert"))
    assert isinstance(model.score.weight, PackedTensor)


def test_heads_inside_another_module_are_found() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(32, 32)  # of no Hugging Face model: quantised as ever
            self.inner = sequence_classifier()

    model = Wrapper()
    quantize_(model, QATConfig(BASE))
    assert linears(model)["classifier"] and not linears(model)["inner.score"]


def test_projections_in_front_of_a_body_are_quantised() -> None:
    text = transformers.LlamaConfig(**SIZE)
    vision = transformers.CLIPVisionConfig(**SIZE)
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=3)
        )
        clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=SIZE, vision_config=SIZE))
    quantize_(model, QATConfig(BASE))
    assert {fqn for fqn, prepared in linears(model).items() if not prepared} == {"lm_head"}
    quantize_(clip, QATConfig(BASE))
    assert all(linears(clip).values())


@pytest.mark.parametrize("route", ["memory", "stream", "command"])
def test_every_route_to_a_folder_leaves_the_head_float(route: str, tmp_path: Path) -> None:
    model, out = sequence_classifier(dtype=torch.bfloat16).bfloat16(), tmp_path / "out"
    model.save_pretrained(tmp_path / "float")
    if route == "memory":
        quantize_(model, "int4-g32")
        aoquant.save_pretrained(model, out)
    elif route == "stream":
        aoquant.convert_checkpoint(tmp_path / "float", "int4-g32", out)
    else:
        main(["convert", "--model", str(tmp_path / "float"), "--out", str(out), "--recipe", "int4-g32"])
    loaded = aoquant.load_pretrained(out, model_class=transformers.LlamaForSequenceClassification)
    assert type(loaded.score.weight) is nn.Parameter
    assert isinstance(loaded.model.layers[0].mlp.up_proj.weight, PackedTensor)


@pytest.mark.parametrize("name", ["llama-score", "llama-qa", "bert-classifier"])
def test_a_folder_with_a_quantised_head_loads_as_it_was_saved(name: str, tmp_path: Path) -> None:
    """Folders and logits of commit 3c4a190, which quantised heads."""
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    cls = {
        "llama-score": transformers.LlamaForSequenceClassification,
        "llama-qa": transformers.LlamaForQuestionAnswering,
        "bert-classifier": transformers.BertForSequenceClassification,
    }[name]
    again = tmp_path / "again"
    model = aoquant.load_pretrained(tmp_path / name, model_class=cls)
    aoquant.save_pretrained(model, again)
    loaders = (
        lambda: model,
        lambda: cls.from_pretrained(tmp_path / name),
        lambda: aoquant.load_pretrained(again, model_class=cls),
    )
    for load in loaders:
        loaded: Any = load().eval()
        head = next(getattr(loaded, n) for n in ("score", "qa_outputs", "classifier") if hasattr(loaded, n))
        assert isinstance(head.weight, PackedTensor)
        with torch.no_grad():
            y = loaded(torch.arange(12).view(2, 6))
        want = load_file(tmp_path / "logits.safetensors")[name]
        # kernels of the float layers differ between processors; codes are compared by the folder's checksums
        torch.testing.assert_close(y.logits if "logits" in y else y.start_logits, want, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("chosen", [None, lambda m, fqn: "query_key_value" in fqn], ids=["default", "filter"])
def test_a_model_whose_linears_are_all_a_subclass_says_which_and_what_to_do(chosen: Any) -> None:
    """Falcon's head is a plain nn.Linear, and no reason to quantise."""
    torch.manual_seed(0)
    falcon = transformers.FalconConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16, bos_token_id=1, eos_token_id=2
    )
    model = transformers.FalconForCausalLM(falcon).eval()
    for config in (BASE, QATConfig(BASE)):
        with (
            pytest.warns(AoquantWarning, match="FalconLinear"),
            pytest.raises(ValueError, match="FalconForCausalLM") as error,
        ):
            quantize_(model, config, chosen)
    message = str(error.value)
    assert all(name in message for name in ("query_key_value", "FalconLinear", "lm_head"))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before = model(ids).logits
        exec(message.partition("first: ")[2], {"model": model, "torch": torch})
        torch.testing.assert_close(model(ids).logits, before)
        quantize_(model, QATConfig(BASE), chosen)
    assert any(hasattr(m, "prepared") for m in model.modules())
