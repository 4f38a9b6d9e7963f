"""Without a q_scale in the checkpoint, queries are cast under 1.0, whatever the warning says."""

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

layer = torch.nn.Module()
layer.kv_cache_dtype = "fp8"
for name in ("k", "v", "q", "prob"):
    layer.register_buffer(f"_{name}_scale", torch.ones(()))
    setattr(layer, f"_{name}_scale_cpu", torch.ones(()))
method = BaseKVCacheMethod(None)
method.create_weights(layer)
layer.k_scale.weight_loader(layer.k_scale, torch.tensor(0.25))
layer.v_scale.weight_loader(layer.v_scale, torch.tensor(0.5))
method.process_weights_after_loading(
    layer
)  # warns: "Checkpoint does not provide a q scaling factor. Setting it to k_scale"
assert layer._k_scale_float == 0.25 and layer._v_scale_float == 0.5
assert layer._q_scale_float == 1.0
