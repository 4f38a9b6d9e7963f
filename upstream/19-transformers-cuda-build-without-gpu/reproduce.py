"""A CUDA build without a GPU cannot quantise on the fly."""

import tempfile

import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

assert torch.version.cuda is not None and not torch.cuda.is_available(), "needs a CUDA build of torch, and no GPU"
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(folder)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    places = {"model": "cpu", "lm_head": "cpu"}
    try:
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map=places)
        message = ""
    except RuntimeError as error:
        message = str(error)
assert "Found no NVIDIA driver" in message
