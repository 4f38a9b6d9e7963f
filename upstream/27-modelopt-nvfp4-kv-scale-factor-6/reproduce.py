"""The exported scale of an NVFP4 KV cache is six times the scale of its fake quantisation."""

import torch
from modelopt.torch.export.quant_utils import KV_CACHE_NVFP4, postprocess_state_dict
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer
from modelopt.torch.quantization.qtensor import NVFP4QTensor

blocks = {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}  # of NVFP4_KV_CFG
quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=(2, 1), block_sizes=blocks))
quantizer.amax = torch.tensor(2688.0)
trained = NVFP4QTensor.get_activation_scaling_factor(quantizer)
assert trained.item() == 1.0  # amax / 2688, as the fake quantisation divides
bound = 448  # of unified_export_hf.py, for fp8 and NVFP4
state = {"layer.self_attn.k_bmm_quantizer._amax": quantizer.amax}
exported = postprocess_state_dict(state, bound, KV_CACHE_NVFP4)["layer.self_attn.k_proj.k_scale"]
assert exported.item() == 6.0
