"""Packed zero points do not load."""

import tempfile

import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)
groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
config = QuantizationConfig(config_groups=groups, format="pack-quantized", quantization_status="frozen")
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).bfloat16()
apply_quantization_config(llama, config)
for module in llama.modules():
    if hasattr(module, "weight_scale"):
        module.weight_scale.data.fill_(0.01)
        module.weight_zero_point.data.zero_()
compressor = ModelCompressor(quantization_config=config)
compressor.compress_model(llama)
with tempfile.TemporaryDirectory() as folder:
    llama.save_pretrained(folder)
    compressor.update_config(folder)
    try:
        AutoModelForCausalLM.from_pretrained(folder)
        message = ""
    except RuntimeError as error:
        message = str(error)
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
assert "ignore_mismatched_sizes" in message or transformers.__version__ < "5.24"
