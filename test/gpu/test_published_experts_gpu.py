"""Published experts on a GPU: gpt-oss's MXFP4 codes, multiplied there and trained from there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.moe_models import IDS, write_mxfp4

from aoquant import QATConfig, load_pretrained, quantize_, unpack_

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_a_prepared_model_starts_where_the_published_one_is(implementation: str, tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    model = load_pretrained(tmp_path, device_map="cuda").eval()
    model.set_experts_implementation(implementation)
    ids = IDS.cuda()
    with torch.no_grad():
        published = model(input_ids=ids).logits
    unpack_(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, published)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.3 * p.abs().mean() * p.grad.sign()
        trained = model.eval()(input_ids=ids).logits
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model(input_ids=ids).logits, trained)
        assert not torch.equal(trained, published)
