"""A calibration that was killed between blocks goes on, and makes the same codes; another calibration is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aoquant import AoquantWarning, CalibrateConfig, PackedWeightConfig, calibrate_ptq
from aoquant.linear.tensor import same_bits
from aoquant.ptq import resume


class Killed(BaseException):
    """Stands for a signal: nothing of the library catches it."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))


def batches(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(48, 64, generator=generator) for _ in range(2)]


def weights(net: Any) -> list[Any]:
    return [block[0].weight for block in net]


@pytest.mark.parametrize("format", ["int4-g32", "mxfp4", "gridflip-row", "fp8-row"])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_killed_calibration_goes_on_with_the_same_codes(
    tmp_path: Path, format: str, asymmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CalibrateConfig(PackedWeightConfig(format), asymmetric=asymmetric)
    whole, again = model(), model()
    wanted = calibrate_ptq(whole, batches(), config)
    import aoquant.ptq.gptq as gptq

    factor, calls = gptq.factor, []

    def stops(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return factor(*arguments)

    monkeypatch.setattr(gptq, "factor", stops)
    with pytest.raises(Killed):
        calibrate_ptq(again, batches(), config, checkpoint=tmp_path)
    assert type(again[0][0]) is nn.Linear and len(list(tmp_path.iterdir())) == 2
    assert calibrate_ptq(again, batches(), config, checkpoint=tmp_path) == wanted
    assert len(calls) == 4  # the last block alone was found anew
    assert all(same_bits(a, b) for a, b in zip(weights(whole), weights(again), strict=True))


def test_a_resumed_calibration_warns_of_few_tokens_too(tmp_path: Path) -> None:
    few = [torch.randn(40, 64)]
    for _ in range(2):
        with pytest.warns(AoquantWarning, match="saw 40 tokens for K = 64") as warned:
            calibrate_ptq(model(), few, CalibrateConfig("int4-g32"), checkpoint=tmp_path)
        assert len([w for w in warned if "tokens for K" in str(w.message)]) == 1


def test_another_model_config_data_or_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate_ptq(model(), batches(), CalibrateConfig("int4-g32"), checkpoint=tmp_path)
    other = model()
    other[2][0].bias.data += 1
    cases: list[tuple[nn.Module, list[Tensor], CalibrateConfig]] = [
        (other, batches(), CalibrateConfig("int4-g32")),
        (model(), batches(1), CalibrateConfig("int4-g32")),
        (model(), batches(), CalibrateConfig("int4-g32", damping=0.02)),
    ]
    for net, data, config in cases:
        with pytest.raises(ValueError, match="another model, config"):
            calibrate_ptq(net, data, config, checkpoint=tmp_path)
        assert type(net[0][0]) is nn.Linear
    with monkeypatch.context() as older:
        older.setattr(resume, "RULES", resume.RULES - 1)
        with pytest.raises(ValueError, match="another model, config"):
            calibrate_ptq(model(), batches(), CalibrateConfig("int4-g32"), checkpoint=tmp_path)
    file = min(tmp_path.iterdir())
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match="damaged"):
        calibrate_ptq(model(), batches(), CalibrateConfig("int4-g32"), checkpoint=tmp_path)


def test_a_flipped_byte_is_refused_and_so_is_a_file_for_a_folder(tmp_path: Path) -> None:
    """Flip one of the codes, of the scales, and of what the file says of its layers."""
    config = CalibrateConfig("int4-g32")
    calibrate_ptq(model(), batches(), config, checkpoint=tmp_path)
    file = min(tmp_path.iterdir())
    intact = file.read_bytes()
    for at in (intact.index(b'"layers"') + 60, len(intact) - 3, len(intact) - 2000):
        file.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
        net = model()
        with pytest.raises(ValueError, match=f"{file.name}: is damaged: remove it"):
            calibrate_ptq(net, batches(), config, checkpoint=tmp_path)
        assert type(net[0][0]) is nn.Linear
    for wrong, message in (
        (file, "checkpoint must be a folder, and .* is a file"),
        (3, "checkpoint must be a folder, got int"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate_ptq(model(), batches(), config, checkpoint=wrong)  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def test_codes_of_other_layers_are_refused(tmp_path: Path) -> None:
    """Another filter_fn is another calibration, whichever of them took more layers."""
    config, fewer = CalibrateConfig("int4-g32"), lambda module, fqn: fqn.endswith(".a")
    for i, (first, then) in enumerate(((fewer, None), (None, fewer))):
        nets = []
        for _ in range(2):
            torch.manual_seed(0)
            nets.append(nn.Sequential(Block(), Block()))
        calibrate_ptq(nets[0], batches(), config, filter_fn=first, checkpoint=tmp_path / str(i))
        with pytest.raises(ValueError, match=r"^0: .*0\.b"):
            calibrate_ptq(nets[1], batches(), config, filter_fn=then, checkpoint=tmp_path / str(i))
        assert type(nets[1][0].a) is nn.Linear
