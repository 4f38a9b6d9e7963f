"""FSDP2: prepare, shard, train, and convert each rank's shard in place.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Runs over NCCL where there is a GPU for each rank, else over gloo on CPUs. Codes and scales are those of the whole
weight, however it is cut: rank 0 quantises an unsharded copy at the end and compares.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from aoquant import NVFP4WeightConfig, QATConfig, quantize_
from aoquant.integrations.distributed import full_state_dict


def mlp(device: str) -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16().to(device)


def main() -> None:
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = f"cuda:{os.environ['LOCAL_RANK']}" if gpus else "cpu"
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    mesh = dist.init_device_mesh("cuda" if gpus else "cpu", (dist.get_world_size(),))

    base = NVFP4WeightConfig()
    model = mlp(device)
    quantize_(model, QATConfig(base, step="prepare"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator(device).manual_seed(dist.get_rank())  # other data on every rank
    for _ in range(3):
        x = torch.randn(32, 64, generator=generator, dtype=torch.bfloat16, device=device)
        (model(x) - x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    trained = copy.deepcopy(full_state_dict(model, cpu_offload=True))  # float weights, on rank 0
    y = model(x)
    quantize_(model, QATConfig(step="convert"))  # every rank, on the module that was sharded
    assert torch.equal(model(x), y)

    packed = full_state_dict(model, cpu_offload=True)
    if dist.get_rank() == 0:
        whole = mlp("cpu")
        whole.load_state_dict(trained)
        quantize_(whole, base)
        same = [torch.equal(whole[i].weight.qdata, packed[f"{i}.weight"].qdata) for i in (0, 2)]
        assert all(same), same
        print(f"{dist.get_world_size()} ranks: shards hold the codes of the whole weight")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
