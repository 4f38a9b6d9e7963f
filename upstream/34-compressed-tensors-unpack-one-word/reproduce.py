"""Zero points that fit one word are packed, and not unpacked."""

import torch
from compressed_tensors.compressors import pack_to_int32, unpack_from_int32

zero = torch.arange(-6, 6, dtype=torch.int8).view(4, 3)
packed = pack_to_int32(zero, 4, packed_dim=0)
found = ""
try:
    unpack_from_int32(packed, 4, zero.shape, packed_dim=0)
except RuntimeError as error:
    found = str(error)
assert "stride" in found, found
