"""The CPU build stores an fp8 KV cache cut off towards zero."""

import torch
from vllm import _custom_ops as ops

head_dim, block = 64, 128
values = torch.linspace(-440, 440, block * head_dim).bfloat16().view(block, 1, head_dim)
k_cache, v_cache = (torch.zeros(1, 1, block, head_dim, dtype=torch.uint8) for _ in range(2))
scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "fp8"}
ops.cpu_attn_reshape_and_cache(values, values, k_cache, v_cache, torch.arange(block), "vec", **scales)
stored = v_cache[0, 0].view(torch.float8_e4m3fn).float()
wanted, x = values[:, 0].to(torch.float8_e4m3fn).float(), values[:, 0].float()
assert (stored != wanted).float().mean() > 0.4
assert bool((stored.abs() <= x.abs()).all())
