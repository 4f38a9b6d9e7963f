"""A pickled float8 tensor cannot be read."""

import io
import pickle

import torch

codes = torch.ones(4).to(torch.float8_e4m3fn)
try:
    pickle.loads(pickle.dumps(codes))
    message = ""
except AttributeError as error:
    message = str(error)
assert message == "type object 'torch.storage.UntypedStorage' has no attribute 'dtype'"
file = io.BytesIO()
torch.save(codes, file)
assert torch.load(io.BytesIO(file.getvalue())).float().tolist() == [1.0] * 4
