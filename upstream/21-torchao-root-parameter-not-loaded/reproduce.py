"""A model with a parameter of its own is saved and cannot be loaded."""

import torch
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict

tensors, metadata = flatten_tensor_state_dict({"logit_scale": torch.ones(()), "0.weight": torch.ones(2, 2)})
try:
    unflatten_tensor_state_dict(tensors, metadata)
    message = ""
except ValueError as error:
    message = str(error)
assert message == "not enough values to unpack (expected 2, got 1)"
