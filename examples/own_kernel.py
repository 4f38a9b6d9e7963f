"""A kernel of your own: a GEMM for int8 weights on a CPU, which the router chooses like any other.

    python examples/own_kernel.py

A backend says for a request why it does not serve it, or None: "I keep this contract". The one of highest priority
runs; `aoquant.backend(name)` forces one, `aoquant.explain` lists all with their reasons. The contract "aoquant" rounds
once:

    y = rn(x q^T * scale + bias)        the product and the sum in float32

int8's codes are exact in every dtype. Of a format with scales of blocks a GEMM multiplies codes times scales, rounded
to the compute dtype, as `format.operand(w, dtype)` makes them. Compare a kernel with the backend "reference", as below:
`verify` compares a prepared layer with its converted one, which run the same kernel.
"""

import torch
from torch import Tensor, nn

import aoquant
from aoquant import ops, quantize_


def why_not(request: ops.Request) -> str | None:
    """Refuse what the kernel was not made for: one that names no contract and no formats takes them all.

    A request has contract, x_format (None: not quantised; behind a transform `HighPrecision()`), w_format, device,
    dtype, m, n, k and scale_dtype.
    """
    if request.contract != "aoquant" or request.x_format is not None or request.w_format.name != "int8-row":
        return "multiplies int8-row weights by inputs in high precision"
    return None if request.device.type == "cpu" else "runs on a CPU"


def run(call: ops.Call) -> Tensor:
    """A call has the tensors: x_hp (*lead, K), w's codes and scales, bias; y is (*lead, N) in `dtype`."""
    x_MK = call.x_hp.reshape(-1, call.k).float()
    y_MN = x_MK @ call.w.codes.float().t() * call.w.scale.t()
    if call.bias is not None:
        y_MN = y_MN + call.bias.float()
    return call.shaped(y_MN.to(call.dtype))


def main() -> None:
    ops.register(ops.Backend("own", 20, why_not, run, reads_codes=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    quantize_(model, aoquant.Int8WeightConfig(granularity="row"))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        y = model(x)
        with aoquant.backend("reference"):
            assert torch.equal(model(x), y)
    print(aoquant.explain(model[0]))


if __name__ == "__main__":
    main()
