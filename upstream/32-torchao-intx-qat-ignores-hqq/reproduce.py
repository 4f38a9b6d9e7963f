"""Intx QAT ignores HQQ scales."""

import torch
from torch import nn
from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig
from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 1024, bias=False)).bfloat16()
x = torch.randn(64, 1024, dtype=torch.bfloat16)
hqq = IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY
base = IntxWeightOnlyConfig(torch.int4, PerGroup(32), intx_choose_qparams_algorithm=hqq)
quantize_(model, QATConfig(base, step="prepare"))
trained = model(x).float()
quantize_(model, QATConfig(base, step="convert"))
decibels = 10 * torch.log10(trained.pow(2).sum() / (trained - model(x).float()).pow(2).sum())
assert 20 < decibels < 25
