"""A tiny Llama, converted in every format that an engine reads, and a process without aoquant that loads what was
exported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from support import forked
from support.models import IDS
from support.models import llama as plain_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from aoquant import PackedTensor, PackedWeightConfig, QATConfig, quantize_


def llama(*, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = plain_llama(tied, dtype, attention_bias=False)
    for parameter in model.parameters():  # blocks of different sizes, as trained weights have them
        if parameter.dim() == 2:
            parameter.data *= torch.rand(parameter.shape[0], 1).to(dtype) + 0.5
    return model


def converted(config: Any, *, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """Prepared with `config` (a PTQ config, or a weight format's name: contract "dequantize", no activations), then
    converted.
    """
    if isinstance(config, str):
        config = PackedWeightConfig(config, contract="dequantize")
    model = llama(tied=tied, dtype=dtype)
    if isinstance(config, PackedWeightConfig) and config.weight == "fp8-tensor":
        for parameter in model.parameters():  # one scale for all: export refuses siblings that differ
            if parameter.dim() == 2:
                parameter.data[0, 0] = 0.25
    quantize_(model, QATConfig(config, step="prepare"))
    quantize_(model, QATConfig(step="convert"))
    return model


def packed(model: PreTrainedModel) -> dict[str, PackedTensor]:
    """The packed weights, by module."""
    linears = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear))
    return {n: m.weight for n, m in linears if isinstance(m.weight, PackedTensor)}


def told(folder: Path) -> dict[str, Any]:
    """What the config of an exported folder says of its quantisation."""
    said: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return said


def write_expected(model: PreTrainedModel, path: Path) -> None:
    """What another process has to find: dequantised weights and logits."""
    weights = {name: w.dequantize() for name, w in packed(model).items()}
    with torch.no_grad():
        torch.save({"weights": weights, "logits": model(IDS).logits}, path)


_ELSEWHERE = """
import json, sys
sys.modules["aoquant"] = None  # any import of it raises
import torch, transformers
from transformers import AutoModelForCausalLM
transformers.logging.set_verbosity_error()
found = {}
for folder in sys.argv[1:]:
    expected = torch.load(folder + ".pt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = model(torch.arange(24).view(2, 12)).logits
    weights = {n: model.get_submodule(n).weight for n in expected["weights"]}
    found[folder] = {
        "logits": torch.equal(logits, expected["logits"]),
        "different": [n for n, w in expected["weights"].items() if not torch.equal(weights[n].to(w.dtype), w)],
        "layers": len(weights),
    }
assert not any(name.startswith("aoquant.") for name in sys.modules) and sys.modules["aoquant"] is None
print(json.dumps(found))
"""


def load_elsewhere(folders: list[Path]) -> dict[str, dict[str, Any]]:
    """Load folders with transformers in a process without aoquant, and compare with FOLDER.pt; by the folder's name."""
    run = forked.python(_ELSEWHERE, *folders)
    assert run.returncode == 0, run.stderr[-3000:]
    return {Path(folder).name: content for folder, content in json.loads(run.stdout.splitlines()[-1]).items()}


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges and a chat template, 128 tokens in all."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:120]
    vocab = {c: i for i, c in enumerate(["<|end|>", *letters, "th", "the", "Ġq"])}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "q")]
    made = Tokenizer(models.BPE(vocab | {c: len(vocab) + i for i, c in enumerate({"Ġ"} - vocab.keys())}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", bos_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer
