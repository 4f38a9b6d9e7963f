"""Fake quantisation of a KV cache passes no gradient."""

import torch
from compressed_tensors.modeling import QuantizedKVCache
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus
from torch import nn
from transformers import LlamaConfig

scheme = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
attention = nn.Module()
attention.quantization_scheme = QuantizationScheme(targets=[], input_activations=scheme)
attention.quantization_status = QuantizationStatus.FROZEN
attention.k_scale, attention.v_scale = nn.Buffer(torch.tensor([0.0625])), nn.Buffer(torch.tensor([0.0625]))
cache = QuantizedKVCache(LlamaConfig(), attention)

k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(2))
keys, values = cache.update(k, v)
assert not torch.equal(keys, k) and torch.allclose(keys, k, rtol=0.07, atol=1e-3)
assert not keys.requires_grad and not values.requires_grad
