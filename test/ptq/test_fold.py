"""AWQ, SmoothQuant, rotations and clip search: the float model computes what it did, and the deployed one is exact."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.export_families import FAMILIES
from support.models import llama
from torch import Tensor, nn

import aoquant
from aoquant import (
    WUSH,
    AoquantWarning,
    CalibrateConfig,
    Int8WeightConfig,
    NVFP4WeightConfig,
    PackedWeightConfig,
    QATConfig,
    calibrate_ptq,
    get_format,
    quantize_,
)
from aoquant.linear.packed import PackedLinear
from aoquant.linear.tensor import same_bits
from aoquant.ptq import clip, links, rotate
from aoquant.report.measure import logits_of, run
from aoquant.transforms.hadamard import hadamard_matrix

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32},
    **{"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0},
}
BATCHES = [torch.randint(1, 96, (4, 32), generator=torch.Generator().manual_seed(i)) for i in range(2)]
ACTIVATIONS = PackedWeightConfig("intx4-g32", "int8-row")
pytestmark = pytest.mark.usefixtures("one_thread")
few_tokens = pytest.mark.filterwarnings("ignore:.*tokens for K", "ignore:R1 unties")


def dense(name: str, **changes: Any) -> Any:
    """A small decoder in float32, with norms whose gains are not 1."""
    torch.manual_seed(0)
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(name, name) + "Config")(**(SIZES | changes))
    return uneven(getattr(transformers, f"{name}ForCausalLM")(config).eval())


def uneven(model: Any) -> Any:
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = parameter.data + 0.3 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def outputs(model: Any, batch: Any = BATCHES[0]) -> Tensor:
    return logits_of(run(model, batch))


def packed(model: nn.Module) -> dict[str, Any]:
    return {n: m.weight for n, m in model.named_modules() if isinstance(m, PackedLinear)}


DENSE = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Phi3", "Granite")
POST_NORMS = ("Gemma2", "Gemma3")
FAST = ("Qwen2", "Gemma", "Phi3", "Gemma3")  # biases; 1 + w; fused layers; norms behind layers


def some(names: Any, fast: Any) -> list[Any]:
    """Every name, and a mark on those that show nearly what a fast one shows."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


@few_tokens
@pytest.mark.parametrize("name", some(DENSE + POST_NORMS, FAST))
def test_the_float_model_computes_what_it_did(name: str) -> None:
    """All seven kinds of layers are scaled, heads and the residual stream are rotated; the float weights of prepared
    layers give the same logits.
    """
    model = dense(name)
    wanted, before = outputs(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    method = "r2+awq" if name in POST_NORMS else "r1+r2+awq"
    calibrate_ptq(model, BATCHES, CalibrateConfig("int4-g32", method), step="prepare")
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before.get(n, torch.empty(0)))}
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith("lm_head")}
    assert {f"{n}.weight" for n in linears} <= changed
    aoquant.set_fake_quant(model, False)
    assert (outputs(model) - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))


@few_tokens
@pytest.mark.parametrize("name", ["Llama", "Gemma"])
@torch.no_grad()
def test_gains_of_16_bits_are_folded_in_float64(name: str) -> None:
    """Fold gains of 1 + w, too, whose sum has more digits than bfloat16."""
    model = dense(name).bfloat16()
    norm, layer = model.model.layers[0].input_layernorm, model.model.layers[0].self_attn.q_proj
    gain_K, w_NK = norm.weight.double() + (name == "Gemma"), layer.weight.double()
    rotate.rotate(model, links.find(model, BATCHES[0]), stream=True, heads=False)
    wanted_NK = w_NK @ (gain_K[:, None] * rotate.random_hadamard(64, 0))
    assert torch.equal(layer.weight, wanted_NK.bfloat16())


@few_tokens
def test_r1_rotates_a_stream_and_r2_heads() -> None:
    """Squares of what layers read are alike over channels where one was large; a tied head gets its own weight."""
    model = dense("Llama", tie_word_embeddings=True)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] *= 50
    wanted, seen = outputs(model), []
    with pytest.warns(AoquantWarning, match="unties"):
        calibrate_ptq(model, BATCHES, CalibrateConfig("int4-g32", "r1+r2"), step="prepare")
    aoquant.set_fake_quant(model, False)
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    torch.testing.assert_close(outputs(model), wanted, atol=1e-4, rtol=1e-4)
    size_K = seen[0].square().flatten(0, 1).mean(0)
    assert size_K.max() < 3 * size_K.mean()
    assert not model.config.tie_word_embeddings and model.lm_head.weight is not model.model.embed_tokens.weight


@few_tokens
@pytest.mark.parametrize("method", ["awq", "r1", "r2"])
@pytest.mark.parametrize(
    "name", some(["gpt-neox", "opt", "gpt-oss", "qwen2-vl", "bert", "t5", "whisper"], ["opt", "bert"])
)
def test_other_families_compute_what_they_did_or_are_refused_by_name(name: str, method: str) -> None:
    """A refusal names a part of the model, or the model's class, and leaves every parameter the object it was."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    cls = getattr(transformers, family.model)
    model = uneven(cls(cls.config_class(**copy.deepcopy(family.config))).float().eval())
    wanted, before = outputs(model, family.inputs), dict(model.named_parameters())
    try:
        calibrate_ptq(model, [family.inputs], CalibrateConfig(PackedWeightConfig("intx4-g32"), method), step="prepare")
    except ValueError as error:
        named = str(error).replace("*", "0")
        parts = (*dict(model.named_modules()), *before)
        assert any(n and f"{n}: " in named for n in parts) or type(model).__name__ in named
        after = dict(model.named_parameters())
        assert after.keys() == before.keys() and all(after[n] is p for n, p in before.items())
        assert torch.equal(outputs(model, family.inputs), wanted)
    else:
        aoquant.set_fake_quant(model, False)
        torch.testing.assert_close(outputs(model, family.inputs), wanted, atol=1e-4, rtol=1e-4)


CASES: dict[str, tuple[Any, str]] = {
    "awq": ("int4-g32", "awq"),
    "clip": (NVFP4WeightConfig(), "clip"),
    "awq clip gptq": ("int4-g32", "awq+clip+gptq"),
    "smoothquant": (ACTIVATIONS, "smoothquant"),
    "smoothquant static": (Int8WeightConfig(activation="int8-tensor-static"), "smoothquant"),
    "rotated gptq": (NVFP4WeightConfig(), "r1+r2+gptq"),
    "rotated clip": (PackedWeightConfig("gridflip-row"), "r2+clip"),
    "fp8 tiles": (PackedWeightConfig("fp8-32x32"), "awq+clip"),
}


@few_tokens
@pytest.mark.parametrize("case", some(CASES, ["awq clip gptq", "smoothquant static", "rotated gptq"]))
def test_packed_prepared_converted_and_reloaded_are_equal(case: str, tmp_path: Path) -> None:
    recipe, method = CASES[case]
    made, prepared = (llama_of_a_block() for _ in range(2))
    calibrate_ptq(made, BATCHES, CalibrateConfig(recipe, method))
    wanted = outputs(made)
    calibrate_ptq(prepared, BATCHES, CalibrateConfig(recipe, method), step="prepare")
    assert torch.equal(outputs(prepared), wanted)
    quantize_(prepared, QATConfig(step="convert"))
    assert torch.equal(outputs(prepared), wanted)
    pairs = packed(prepared)
    assert len(pairs) == 7 and all(same_bits(pairs[n], w) for n, w in packed(made).items())
    aoquant.save_pretrained(made, tmp_path)
    assert torch.equal(outputs(aoquant.load_pretrained(tmp_path)), wanted)


@few_tokens
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-4over6", "mxfp4", "int4-g32", "int8", "gridflip"])
def test_scales_follow_weights_that_train_from_a_fold_and_are_held_where_codes_were_chosen(recipe: str) -> None:
    """Under held scales block scales would stay those of the first weights. Four-over-six chooses codes and scales
    together, so that only scales that follow them are possible.
    """
    for method, scales in (("awq", "dynamic"), ("r2", "dynamic"), ("awq+gptq", "static")):
        model = llama_of_a_block()
        if scales == "static" and recipe in ("nvfp4-4over6", "gridflip"):
            continue
        calibrate_ptq(model, BATCHES, CalibrateConfig(recipe, method), step="prepare")
        layer: Any = model.model.layers[0].mlp.down_proj
        assert layer.prepared.recipe.weight_scales == scales
        with torch.no_grad():
            layer.weight *= 3
        operand, weight = layer.prepared.recipe.fprop_weight, layer.weight.detach()
        anew = operand.decode(operand.encode(weight), weight.dtype)
        assert torch.equal(layer.quantised_weight(), anew) == (scales == "dynamic")


def llama_of_a_block() -> Any:
    torch.manual_seed(0)
    return llama(tied=True, num_hidden_layers=1, hidden_size=64, intermediate_size=96)


def outlier_net() -> tuple[nn.Sequential, list[Tensor]]:
    """A norm and a layer whose input has one channel that is 60 times as large as the others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    with torch.no_grad():
        net[0].weight[5] = 60.0
    return net, [torch.randn(128, 64) for _ in range(2)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("recipe", "method"), [("int4-g32", "awq"), (Int8WeightConfig(activation="int8-row"), "smoothquant")]
)
def test_scales_help_where_one_channel_is_large(recipe: Any, method: str) -> None:
    lost = {}
    for each in ("nearest", method):
        net, batches = outlier_net()
        wanted = net(batches[0])
        report = calibrate_ptq(net, batches, CalibrateConfig(recipe, each))
        lost[each] = float((net(batches[0]) - wanted).square().sum())
    assert lost[method] < 0.3 * lost["nearest"]
    assert report.rows[0].error < 0.5 * report.rows[0].nearest and report.rows[0].tokens == 256


def test_scales_are_of_the_largest_input_of_all_batches() -> None:
    """Whichever batch comes last."""
    found = []
    for order in (1, -1):
        net, batches = outlier_net()
        batches[0][:, 7] *= 30.0
        config = CalibrateConfig(Int8WeightConfig(activation="int8-row"), "smoothquant")
        calibrate_ptq(net, batches[::order], config)
        found.append(net[0].weight.detach())
    assert torch.equal(*found)


def test_candidates_are_compared_on_rows_from_all_of_a_batch() -> None:
    """The first half of the batch is zero, and shows nothing of any scale."""
    net, _ = outlier_net()
    batch = torch.cat([torch.zeros(512, 64), torch.randn(512, 64)])
    calibrate_ptq(net, [batch], CalibrateConfig("int4-g32", "awq"))
    assert net[0].weight[5] < 45.0  # was 60


@pytest.mark.parametrize(
    "name", ["int4-g32", "intx3-row", "nvfp4", "mxfp4", "fp8-32x32", "gridflip-row", "int8-tensor"]
)
def test_clipped_scales_err_no_more_than_any_share_of_the_grid(name: str) -> None:
    """Against the whole weight clipped by one share; the first share is 1, the format's own scales."""
    format = get_format(name)
    generator = torch.Generator().manual_seed(0)
    w_NK, x_MK = torch.randn(64, 64, generator=generator), torch.randn(256, 64, generator=generator)
    gram_KK = x_MK.t() @ x_MK

    def lost(e: Any) -> float:
        d_NGB = (format.decode(e, torch.float32) - w_NK).unflatten(1, (-1, format.block or 64))
        x_MGB = x_MK.unflatten(1, (-1, format.block or 64))
        return float(torch.einsum("mgb,ngb->mng", x_MGB, d_NGB).square().sum())

    found, own = lost(clip.encode(format, w_NK, None, gram_KK)), lost(format.encode(w_NK))
    assert found <= own * (1 + 1e-6)
    if format.block is not None:
        assert found < 0.96 * own


def unfoldable() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))


X = [torch.randn(64, 32, generator=torch.Generator().manual_seed(0))]
BAD: dict[str, tuple[Any, Any, str, str]] = {
    "no source": (unfoldable, "int4-g32", "awq", r"3: its input channels are not.*skip_incompatible=True"),
    "weight only": (unfoldable, "int4-g32", "smoothquant", "1: its activations are not quantised"),
    "fitted": (unfoldable, NVFP4WeightConfig(transform=WUSH(16)), "awq", r"1: its fitted transform \(WUSH\)"),
    "hqq": (unfoldable, PackedWeightConfig("intx4-g32-hqq"), "clip", "1: .*Leave out clip"),
    "no stream": (unfoldable, "int4-g32", "r1", "Sequential: has no nn.Embedding"),
    "meta": (lambda: unfoldable().to("meta"), "int4-g32", "awq", "1: its weight is on the meta device"),
    "no heads": (unfoldable, "int4-g32", "r2", "Sequential: no layer reads the values of attention heads"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_folded_is_refused_by_name(case: str) -> None:
    make, recipe, method, message = BAD[case]
    net = make()
    before = dict(net.named_parameters())
    with pytest.raises(ValueError, match=message):
        calibrate_ptq(net, X, CalibrateConfig(recipe, method))
    assert all(type(m) in (nn.Sequential, nn.LayerNorm, nn.Linear, nn.GELU) for m in net.modules())
    assert all(before[n] is p for n, p in net.named_parameters())


class _ThriceNorm(nn.RMSNorm):
    """A norm that multiplies by 2 + w."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape) * (2 + self.weight)


def tied_norms() -> nn.Module:
    net = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32), nn.RMSNorm(32), nn.Linear(32, 32))
    net[2].weight = net[0].weight
    return net


NAN, ZERO = torch.full((4, 32), torch.nan), torch.zeros(4, 32)
UNUSABLE: dict[str, tuple[Any, list[Tensor], str]] = {
    "norm": (
        lambda: nn.Sequential(_ThriceNorm(32), nn.Linear(32, 32)),
        X,
        r"1: 0 before it multiplies neither by w nor by 1 \+ w: use method='gptq'",
    ),
    "tied": (tied_norms, X, r"1: 0: its weight is tied \(0, 2\).*untie it"),
    "first NaN": (unfoldable, [NAN, *X], "Sequential: its outputs for the first batch hold NaN or Inf"),
    "later NaN": (lambda: unfoldable()[:2], [*X, NAN], "1: its input holds NaN or Inf: look for it in the batches"),
    "no token": (lambda: unfoldable()[:2], [ZERO[:0]], "1: no token reaches it"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_layers_and_inputs_that_no_scale_can_be_made_of_are_refused_by_name(case: str) -> None:
    make, batches, message = UNUSABLE[case]
    net = make()
    before = dict(net.named_parameters())
    with pytest.raises(ValueError, match=message):
        calibrate_ptq(net, batches, CalibrateConfig("int4-g32", "awq"))
    assert all(before[n] is p for n, p in net.named_parameters())


def test_layers_that_cannot_be_folded_are_quantised_without_scales_when_asked() -> None:
    report = calibrate_ptq(unfoldable(), X, CalibrateConfig("int4-g32", "awq"), skip_incompatible=True)
    assert [row.layer for row in report.rows] == ["1", "3"] and "3: its input channels" in report.notes[0]


@few_tokens
def test_a_late_failure_gives_back_ties_and_weights() -> None:
    """The head is tied and the config says so again when a layer turns out not to fit its format."""
    model = dense("Llama", tie_word_embeddings=True, intermediate_size=112)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="down_proj"):
        calibrate_ptq(model, BATCHES, CalibrateConfig("int4-g32", "r1+r2"))
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    assert all(before[n] is p for n, p in model.named_parameters())


def test_a_fold_that_changes_outputs_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from aoquant.ptq import rotate

    model = dense("Llama")
    before = dict(model.named_parameters())
    monkeypatch.setattr(rotate, "hadamard_matrix", lambda n: torch.eye(n, dtype=torch.float64) * 1.1)
    with pytest.raises(ValueError, match="LlamaForCausalLM: a rotation changed its outputs"):
        calibrate_ptq(model, BATCHES, CalibrateConfig("int4-g32", "r2"))
    assert all(before[n] is p for n, p in model.named_parameters())


@few_tokens
def test_a_killed_calibration_goes_on_behind_a_fold(tmp_path: Path) -> None:
    config = CalibrateConfig("int4-g32", "r1+awq+gptq")
    whole, again = dense("Llama"), dense("Llama")
    calibrate_ptq(whole, BATCHES, config, checkpoint=tmp_path)
    max(tmp_path.iterdir()).unlink()
    calibrate_ptq(again, BATCHES, config, checkpoint=tmp_path)
    assert all(same_bits(packed(again)[n], w) for n, w in packed(whole).items())


@pytest.mark.parametrize("n", [1, 2, 12, 20, 28, 36, 40, 64, 96, 104, 640])
def test_hadamard_matrices(n: int) -> None:
    h = hadamard_matrix(n)
    torch.testing.assert_close(h @ h.t(), torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(h.abs(), torch.full_like(h, n**-0.5))


@pytest.mark.parametrize("n", [0, 3, 92])
def test_hadamard_matrices_that_are_not_known(n: int) -> None:
    with pytest.raises(ValueError, match=f"size {n}"):
        hadamard_matrix(n)


@pytest.mark.parametrize(
    "arguments",
    [{"method": m} for m in ("awq+smoothquant", "gptq+nearest", "awq+awq", "", "r3")] + [{"alpha": 1.5}, {"grid": 0}],
)
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="CalibrateConfig"):
        CalibrateConfig("int4-g32", **arguments)


class _Towers(nn.Module):
    """Two towers of attention's layers; a batch without an image runs one alone."""

    def __init__(self) -> None:
        super().__init__()
        for tower in ("text", "vision"):
            layers = nn.ModuleDict({n: nn.Linear(16, 16, bias=False) for n in ("q_proj", "k_proj", "v_proj", "o_proj")})
            layers.head_dim = 16
            self.add_module(tower, layers)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        for tower, given in ((self.text, x), (self.vision, image)):
            if given is not None:
                scores = tower["q_proj"](given) @ tower["k_proj"](given).mT
                x = x + tower["o_proj"](scores.softmax(-1) @ tower["v_proj"](given))
        return x


def test_layers_that_the_first_batch_does_not_reach_are_in_no_link() -> None:
    torch.manual_seed(0)
    found = links.find(_Towers(), torch.randn(2, 5, 16))
    assert "text.v_proj" in [link.source for link in found.links]
    assert not [link for link in found.links if any(n.startswith("vision") for n in (link.source, *link.layers))]


def test_a_norm_that_subtracts_the_mean_commutes_with_no_rotation() -> None:
    assert rotate._commutes(nn.RMSNorm(64)) and not rotate._commutes(nn.LayerNorm(64, bias=False))


def test_an_error_of_a_norm_is_no_verdict() -> None:
    """A norm that takes more than a tensor is another one; one that fails says why."""

    class Gated(nn.LayerNorm):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return super().forward(x) * gate

    class Open(nn.LayerNorm):
        def forward(self, x: Tensor, *others: Any, **options: Any) -> Tensor:
            return super().forward(x)

    class Broken(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("Expected all tensors to be on the same device")

    assert links.offset(nn.LayerNorm(8)) == 0.0 and links.offset(Gated(8)) is None
    assert links.offset(Open(8)) == 0.0
    with pytest.raises(RuntimeError, match="same device"):
        links.offset(Broken(8))


@pytest.mark.parametrize("method", ["awq", "r2"])
def test_conv1d_is_a_linear_layer_too(method: str) -> None:
    """GPT-2 stores its weights (K, N): scales and rotations are folded along the other dimension."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=64, n_embd=64, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2
    )
    model = uneven(transformers.GPT2LMHeadModel(config).eval())
    wanted, before = outputs(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    report = calibrate_ptq(
        model, BATCHES, CalibrateConfig("int8-weight", method), step="prepare", skip_incompatible=True
    )
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    wide = {"awq": ("attn.c_attn", "mlp.c_fc"), "r2": ("attn.c_attn", "attn.c_proj")}[method]
    assert {f"transformer.h.0.{n}.weight" for n in wide} <= changed
    assert [n.split(":")[0] for n in report.notes] == (["transformer.h.0.mlp.c_proj"] if method == "awq" else [])
    aoquant.set_fake_quant(model, False)
    torch.testing.assert_close(outputs(model), wanted, atol=1e-5, rtol=1e-5)


@few_tokens
def test_links_of_a_float16_model_are_those_of_float32() -> None:
    """Products below 2^-14 lose digits in float16, so powers of two are tried in bfloat16; the tensors come back."""
    model, wide = llama_of_a_block().half(), llama_of_a_block()
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    found, wanted = ([(s.source, s.layers) for s in links.find(m, BATCHES[0]).links] for m in (model, wide))
    assert found == wanted and len(found) == 5
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[n] is t for n, t in before.items())
    calibrate_ptq(model, BATCHES, CalibrateConfig("int4-g32", "awq"))
    assert len(packed(model)) == 7
