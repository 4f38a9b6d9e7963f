"""Stacked experts in other libraries' folders: each expert's matrices out, packed stacks in, nothing rounded."""

from __future__ import annotations

import torch

IDS = torch.arange(32).view(2, 16)
