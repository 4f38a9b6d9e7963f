"""A model in host memory, calibrated a block at a time on a GPU, has the codes of a model on that GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bits import equal_weights
from support.models import llama

from aoquant import CalibrateConfig, calibrate_ptq

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*tokens for K", "ignore:R1 unties")]


def net(**changes: Any) -> Any:
    torch.manual_seed(0)
    return llama(dtype=torch.bfloat16, **changes)


@pytest.mark.parametrize("recipe", ["int4-g32", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("method", ["gptq", "awq+clip+gptq", "r1+r2+gptq"])
def test_codes_are_those_of_a_model_on_the_gpu(recipe: str, method: str) -> None:
    batches = [torch.randint(0, 128, (8, 64), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    there, here = net().cuda(), net()
    config = CalibrateConfig(recipe, method)
    wanted = calibrate_ptq(there, [ids.cuda() for ids in batches], config)
    found = calibrate_ptq(here, batches, config, device="cuda")
    assert {t.device.type for t in (*here.parameters(), *here.buffers())} == {"cpu"}
    if method == "gptq":  # scales and rotations of a model in host memory are computed there, in another order
        assert found == wanted
        tensors = dict(there.named_parameters())
        assert all(equal_weights(t, tensors[n].cpu()) for n, t in here.named_parameters())
    assert here.cuda()(batches[0].cuda()).logits.isfinite().all()


def test_a_gpu_holds_one_block_at_a_time() -> None:
    sizes: Any = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    model = net(**sizes)
    block = sum(p.nbytes for p in model.model.layers[0].parameters())
    ids = torch.randint(0, 128, (4, 64))
    for _ in range(2):  # the first run allocates the libraries' workspaces, which stay
        torch.cuda.reset_peak_memory_stats()
        calibrate_ptq(net(**sizes | {"num_hidden_layers": 1}), [ids], CalibrateConfig("int4-g128"), device="cuda")
    one = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    calibrate_ptq(model, [ids], CalibrateConfig("int4-g128"), device="cuda")
    assert torch.cuda.max_memory_allocated() < one + block
