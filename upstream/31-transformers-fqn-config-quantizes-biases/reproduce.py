"""FqnToConfig quantises biases and norms."""

import tempfile

import torch
from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, quantize_
from torchao.utils import TorchAOBaseTensor
from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig

size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=96, attention_bias=True)).bfloat16()
int8 = Int8WeightOnlyConfig(version=2)


def quantized(model: torch.nn.Module) -> set[str]:
    return {name.rsplit(".", 1)[-1] if "norm" not in name else "norm"
            for name, value in model.named_parameters() if isinstance(value, TorchAOBaseTensor)}  # fmt: skip


with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    for pattern, wrong in (("_default", "bias"), (r"re:model\.layers\..*", "norm")):
        config = FqnToConfig({pattern: int8})
        loaded = LlamaForCausalLM.from_pretrained(
            folder, quantization_config=TorchAoConfig(config), dtype=torch.bfloat16
        )
        assert wrong in quantized(loaded)
        failed = False
        try:
            loaded(torch.arange(4).view(1, 4))
        except NotImplementedError:
            failed = True
        assert failed
quantize_(model, FqnToConfig({"_default": int8}), filter_fn=None)
assert quantized(model) == {"weight"}
