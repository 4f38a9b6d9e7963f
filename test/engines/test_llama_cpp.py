"""llama.cpp runs what was trained: ggml's own code reads the trained weights from the file and rounds activations as
the recipe did, and the perplexity of the served model is the prepared model's.

`make engines` builds llama-cpp-python from its source into an environment of its own.
"""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.engines import IDS_SHAPE, demo, engine_python, heldout, log_probabilities, run_in, unbiased
from torch import nn

from aoquant import PackedTensor, QATConfig, export, get_format, quantize_
from aoquant.recipes import get_recipe

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
RECIPES = ["gguf-q4_0", "gguf-q8_0"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module", params=RECIPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe: the prepared model's log-probabilities, the packed weights, and what llama.cpp finds in the file."""
    python = engine_python("llama-cpp")
    folder = tmp_path_factory.mktemp(request.param)
    model, tokenizer = demo()
    tokenizer.chat_template = TEMPLATE
    ids, text = heldout(tokenizer)
    quantize_(model, get_recipe(request.param).prepare())
    prepared = log_probabilities(model, ids)
    quantize_(model, QATConfig(step="convert"))
    export(model, folder / "out", "gguf", tokenizer)
    (folder / "out" / "model.gguf").rename(folder / "model.gguf")
    tensors = {t.name: t for t in gguf.GGUFReader(folder / "model.gguf").tensors}
    linears = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    packed = {n: w for n, w in linears.items() if isinstance(w, PackedTensor)}
    asked: dict[str, Any] = {}
    for name, w in packed.items():
        _, _, layer, module = name.split(".", 3)
        t = tensors[f"blk.{layer}.{NAMES[module]}.weight"]
        asked |= {f"bytes_{name}": t.data.reshape(-1), f"type_{name}": int(t.tensor_type), f"size_{name}": w.numel()}
    torch.manual_seed(0)
    x = torch.cat(
        [torch.randn(20_000, 32), torch.randn(2000, 32) * 1e-4, torch.randn(2000, 32) * 300, torch.zeros(4, 32)]
    )
    np.savez(folder / "request.npz", **asked, x=x.numpy(), ids=ids.numpy(), text=text, chat="Where is the river?")
    run_in(python, "in_llama_cpp.py", folder)
    found = np.load(folder / "found.npz")
    return {"packed": packed, "prepared": prepared, "found": found, "x": x, "tokenizer": tokenizer, "text": text}


def rotated_back(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in Hugging Face's order, of rows in llama.cpp's."""
    return values.reshape(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)


def test_ggml_decodes_the_trained_weights(case: dict[str, Any]) -> None:
    assert len(case["packed"]) == 28
    for name, w in case["packed"].items():
        values = torch.from_numpy(case["found"][f"values_{name}"]).view(w.shape)
        heads = {"q_proj": 4, "k_proj": 2}.get(name.rpartition(".")[2])
        assert torch.equal(values if heads is None else rotated_back(values, heads), w.dequantize(torch.float32)), name


def test_ggml_rounds_activations_as_the_recipe_did(case: dict[str, Any]) -> None:
    e = get_format("q8_0-x86").encode(case["x"])
    assert e.scale is not None
    scales = e.scale.to(torch.float16).reshape(-1, 1).view(torch.uint8)
    ours = torch.cat([scales, e.codes.reshape(-1, 32).view(torch.uint8)], 1)
    assert torch.equal(ours.reshape(-1), torch.from_numpy(case["found"]["q8_0"]))


def test_perplexity_is_the_prepared_models(case: dict[str, Any]) -> None:
    """The rest is the order of sums and bfloat16 between layers, which llama.cpp keeps in float32: noise, no bias."""
    served = case["found"]["log_probabilities"]
    assert served.shape == case["prepared"].shape == (IDS_SHAPE[0] * (IDS_SHAPE[1] - 1),)
    here, there = math.exp(-case["prepared"].mean()), math.exp(-served.mean())
    noise = unbiased(torch.from_numpy(served - case["prepared"]))
    print(f"perplexity: prepared {here:.4f}, llama.cpp {there:.4f}; log-probabilities {noise:.4f} apart")


def test_llama_cpp_reads_text_and_chats(case: dict[str, Any]) -> None:
    found, tokenizer = case["found"], case["tokenizer"]
    assert found["tokens"].tolist() == tokenizer(case["text"], add_special_tokens=False)["input_ids"]
    assert str(found["template"]) == TEMPLATE
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Where is the river?"}], return_dict=False)
    assert abs(int(found["prompt_tokens"]) - len(prompt)) <= 1  # a beginning-of-sequence token
    assert str(found["answer"]).strip()
