"""KV caches on a GPU: the writer's bytes, attention over bytes, and prepared models that generate as converted ones.

python -m pytest -m gpu test/gpu/test_kv_gpu.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from aoquant import KVCacheConfig, QATConfig, quantize_
from aoquant.formats import get_kv_format
from aoquant.formats.kv import _mixed
from aoquant.kv import packed
from aoquant.ops import kv

pytestmark = pytest.mark.gpu

BF16, CUDA = torch.bfloat16, torch.device("cuda")
# the largest share of codes and scales that `div.full` and fused multiply-adds change, against IEEE on a CPU
TOKEN_HEAD = {"fp8-token-head": (0.004, 1.0), "int8-token-head": (0.001, 0.2), "int4-token-head": (0.02, 0.2)}
STATIC = ("fp8", "fp8-e5m2")
ATTENDED = (*STATIC, *TOKEN_HEAD)


def rows(d: int, *shape: int) -> Tensor:
    """Keys as a model makes them, a transposed view: large, small and zero rows, NaN in none."""
    x = torch.randn(shape[0], shape[2], shape[1], d, device=CUDA).transpose(1, 2)
    x = x * torch.randint(-12, 12, (*shape, 1), device=CUDA).float().exp2()
    x[0, 0, 0] = 0
    x[-1, -1, -1, 3] = 3e4
    return x.to(BF16)


def scale_of(name: str, *values: float) -> Tensor | None:
    return torch.tensor(values or (2.0**-4,), device=CUDA) if name in STATIC else None


@pytest.mark.parametrize("d", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("values", [(), (0.3,), (0.0437, 0.3, 2.0)], ids=["pow2", "tensor", "head"])
@pytest.mark.parametrize("name", STATIC)
def test_static_bytes_are_the_references(name: str, values: tuple[float, ...], d: int) -> None:
    x, f, scale = rows(d, 2, 3, 257), get_kv_format(name), scale_of(name, *values)
    scale = scale if scale is None or scale.numel() == 1 else scale.view(3, 1, 1)
    assert kv.writes(f, x, scale)
    got = kv.pack(x, f, scale)
    assert torch.equal(got.cpu(), f.pack(x.cpu(), None if scale is None else scale.cpu()))
    assert torch.equal(kv.values(x, f, scale), f.unpack(got, scale, BF16))


@pytest.mark.parametrize("d", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("name", TOKEN_HEAD)
def test_token_head_bytes_are_near_the_references(name: str, d: int) -> None:
    """Codes differ by one step at most, scales by two units in the last place.

    int4: a row whose largest and smallest values are each other's negative has its zero point at a tie of 7.5, and an
    inexact quotient falls to either side.
    """
    x, f = rows(d, 2, 3, 4099), get_kv_format(name)
    assert kv.writes(f, x, None)
    got, want, n = kv.pack(x, f, None).cpu(), f.pack(x.cpu()), f.row_bytes(d)
    scales = [t[..., n:].contiguous().view(torch.int32).squeeze(-1) for t in (got, want)]
    codes = [t[..., :n] for t in (got, want)]
    ulp, same = 2, torch.ones_like(scales[0], dtype=torch.bool)
    if name == "int4-token-head":
        same = scales[0] & 15 == scales[1] & 15  # another zero point shifts all codes of its row
        assert (~same).float().mean() < 0.02
        codes = [torch.stack((c & 15, c >> 4), -1).flatten(-2) for c in codes]
        ulp = 16
    elif name == "int8-token-head":
        codes = [c.view(torch.int8) for c in codes]
    assert ((scales[0] - scales[1]).abs()[same] <= ulp).all()
    steps = (codes[0].int() - codes[1].int())[same].abs()
    assert steps.max() <= 1
    share, scale_share = TOKEN_HEAD[name]
    assert (steps != 0).float().mean() <= share and (scales[0] != scales[1]).float().mean() <= scale_share
    assert torch.equal(kv.values(x, f, None), f.unpack(got.to(CUDA), None, BF16))


@pytest.mark.parametrize("name", ["fp8-token-head", "int8-token-head", "int4-token-head"])
def test_bytes_are_vllms(name: str) -> None:
    """1.6e7 codes for each head dimension, by vLLM's Triton writers."""
    flash = pytest.importorskip("vllm.v1.attention.ops.triton_reshape_and_cache_flash")
    int4 = pytest.importorskip("vllm.v1.attention.ops.int4_per_token_head")
    modes = pytest.importorskip("vllm.v1.kv_cache_interface").KVQuantMode
    f = get_kv_format(name)
    for d in (64, 128):
        x = rows(d, 1, 8, 1 << 14)
        k = x[0].transpose(0, 1).contiguous()  # (tokens, heads, d)
        tokens = len(k)
        dtype = {"fp8-token-head": torch.float8_e4m3fn, "int8-token-head": torch.int8}.get(name, torch.uint8)
        caches = [
            torch.zeros(tokens // 16, 16, 8, f.row_bytes(d), dtype=torch.uint8, device=CUDA).view(dtype) for _ in "kv"
        ]
        scales = [torch.zeros(tokens // 16, 16, 8, device=CUDA) for _ in "kv"]
        slots = torch.arange(tokens, device=CUDA)
        if name == "int4-token-head":
            y = _mixed(k.float(), signs_first=True).to(BF16)  # vLLM's rotation has other sums: its writer gets ours
            int4._run_reshape_kernel(
                int4._reshape_cache_int4_kernel, key=y, value=y, key_cache=caches[0], value_cache=caches[1],
                k_scale_cache=scales[0], v_scale_cache=scales[1], slot_mapping=slots, packing_factor=2,
            )  # fmt: skip
        else:
            mode = modes.FP8_PER_TOKEN_HEAD if name == "fp8-token-head" else modes.INT8_PER_TOKEN_HEAD
            flash.triton_reshape_and_cache_flash_per_token_head_quant(k, k, *caches, *scales, slots, mode)
        got = kv.pack(x, f, None)[0].transpose(0, 1)
        codes = caches[0].view(torch.uint8).view(tokens, 8, -1)
        assert torch.equal(got[..., : f.row_bytes(d)], codes)
        assert torch.equal(got[..., -4:].contiguous().view(torch.float32).squeeze(-1), scales[0].view(tokens, 8))


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention in float64, and the same of absolute values."""
    k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    s = q.double() @ k.mT * q.shape[3] ** -0.5
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask.double()
    p = s.softmax(-1)
    return (p @ v).transpose(1, 2), (p @ v.abs()).transpose(1, 2)


@pytest.mark.parametrize("masked", ["", "bool", "added"])
@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [*((n, n) for n in ATTENDED), ("fp8", "int4-token-head"), ("int4-token-head", "int8-token-head")],
)
@pytest.mark.parametrize(("d", "heads", "group"), [(128, 8, 4), (64, 2, 1), (256, 1, 8), (128, 1, 24)])
def test_attention_over_bytes(d: int, heads: int, group: int, k_name: str, v_name: str, masked: str) -> None:
    """P is rounded to float16, and so is the query of int4 keys, the result to bfloat16."""
    kf, vf = get_kv_format(k_name, "k"), get_kv_format(v_name, "v")
    ks, vs = scale_of(k_name), scale_of(v_name, *(2.0**-5 for _ in range(heads)))
    assert kv.why_not_attend(kf, vf, d, BF16, CUDA) is None
    for batch, tokens in ((1, 1), (3, 63), (2, 1000)):
        q = torch.randn(batch, heads * group, 1, d, device=CUDA, dtype=BF16)
        kp, vp = (
            kv.pack(torch.randn(batch, heads, tokens, d, device=CUDA, dtype=BF16), f, s)
            for f, s in ((kf, ks), (vf, vs if vs is None else vs.view(-1, 1, 1)))
        )
        # a cache with room behind its tokens, which holds bytes of NaN
        room = [
            torch.full((batch, heads, tokens + 9, p.shape[3]), 255, dtype=torch.uint8, device=CUDA) for p in (kp, vp)
        ]
        for whole, p in zip(room, (kp, vp), strict=True):
            whole[:, :, :tokens] = p
        mask = None
        if masked:
            mask = torch.rand(batch, 1, 1, tokens, device=CUDA) < 0.6
            mask[..., -1] = True
            if masked == "added":
                mask = torch.where(mask, 0.0, torch.finfo(BF16).min).to(BF16)
        got = kv.attend(q, room[0][:, :, :tokens], room[1][:, :, :tokens], kf, vf, ks, vs, mask, d**-0.5)
        want, size = exact(
            q,
            kf.unpack(kp, ks, torch.float32),
            vf.unpack(vp, vs if vs is None else vs.view(-1, 1, 1), torch.float32),
            mask,
        )
        assert ((got.double() - want).abs() <= 2.0**-7 * size + 1e-6).all()


@pytest.mark.parametrize("name", ATTENDED)
def test_tokens_without_meaning(name: str) -> None:
    """Rows of a static cache that were never written are zeros; masked rows may hold NaN scales, as padding does."""
    f, scale = get_kv_format(name), scale_of(name)
    q = torch.randn(1, 8, 1, 128, device=CUDA, dtype=BF16)
    k, v = (kv.pack(torch.randn(1, 2, 200, 128, device=CUDA, dtype=BF16), f, scale) for _ in "kv")
    k[:, :, 150:] = v[:, :, 150:] = 0
    got = kv.attend(q, k, v, f, f, scale, scale, None, 128**-0.5)
    want, size = exact(q, f.unpack(k, scale, torch.float32), f.unpack(v, scale, torch.float32), None)
    assert ((got.double() - want).abs() <= 2.0**-7 * size + 1e-6).all()
    mask = (torch.arange(200, device=CUDA) < 150).view(1, 1, 1, 200)
    got = kv.attend(q, k, v, f, f, scale, scale, mask, 128**-0.5)
    if not f.static:
        k[:, :, 150:, -4:] = v[:, :, 150:, -4:] = 255
    assert torch.equal(kv.attend(q, k, v, f, f, scale, scale, mask, 128**-0.5), got)


@pytest.mark.parametrize("name", ATTENDED)
def test_large_and_small_magnitudes(name: str) -> None:
    """Queries, scores and scales of values far from 1 lose nothing in float16; a NaN of a row stays in its head."""
    f = get_kv_format(name)
    scale = torch.tensor([2.0**-20], device=CUDA) if f.static else None
    q = torch.randn(1, 8, 1, 128, device=CUDA, dtype=BF16)
    q *= torch.tensor([2.0**e for e in (-60, -20, -8, 0, 20, 1, 2, 3)], device=CUDA, dtype=BF16).view(1, 8, 1, 1)
    k = torch.randn(1, 2, 300, 128, device=CUDA, dtype=BF16) * (2.0**-16 if f.static else 1)
    v = torch.randn(1, 2, 300, 128, device=CUDA) * torch.linspace(-12, 12, 300, device=CUDA).exp2().view(1, 1, -1, 1)
    k, v = kv.pack(k, f, scale), kv.pack((v * (2.0**-14 if f.static else 1)).to(BF16), f, scale)
    got = kv.attend(q, k, v, f, f, scale, scale, None, 128**-0.5)
    want, size = exact(q, f.unpack(k, scale, torch.float32), f.unpack(v, scale, torch.float32), None)
    near = (got.double() - want).abs() <= 2.0**-7 * size + 1e-30
    if name == "int4-token-head":  # the rounding of the rotated query grows with scores
        near = near[:, :, :4]
    assert near.all()
    q[0, 1, 0, 5] = float("nan")
    bad = kv.attend(q, k, v, f, f, scale, scale, None, 128**-0.5)
    assert bad[0, 0, 1].isnan().all() and torch.equal(
        bad[0, 0, [0, 2, 3, 4, 5, 6, 7]], got[0, 0, [0, 2, 3, 4, 5, 6, 7]]
    )


def model(family: str, implementation: str = "sdpa") -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    config: Any
    if family == "llama":
        config, kind = LlamaConfig(**sizes), LlamaForCausalLM
    else:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = Gemma3TextConfig(**sizes, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=32)
        kind = Gemma3ForCausalLM
    config._attn_implementation = implementation
    with CUDA:
        return kind._from_config(config, dtype=BF16).eval()


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 2}],
    ids=["dynamic", "static", "beams"],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", ATTENDED)
def test_prepared_generates_what_converted_does(
    monkeypatch: pytest.MonkeyPatch, name: str, family: str, options: dict[str, Any]
) -> None:
    """By the same kernel over the same bytes; a padded batch, too."""
    calls = []
    original = kv.attend
    monkeypatch.setattr(kv, "attend", lambda *args: (calls.append(1), original(*args))[1])
    made = model(family)
    scale: Any = {"scale": 2.0**-4} if name in STATIC else {}
    quantize_(made, QATConfig(KVCacheConfig(name, **scale), step="prepare"))
    ids = torch.randint(1, 97, (2, 12), device=CUDA)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def run() -> list[Tensor]:
        found = []
        for m in (None, mask):
            out = made.generate(
                ids, attention_mask=m, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True,
                **options,
            )  # fmt: skip
            found += [out.sequences, torch.stack(out.logits)]
        return found

    before = run()
    assert len(calls) >= 2 * 3 * 5
    quantize_(made, QATConfig(step="convert"))
    assert all(map(torch.equal, before, run()))


@pytest.mark.parametrize("name", ATTENDED)
def test_eager_attention_reads_what_is_stored(name: str) -> None:
    """eager: prefill and decoding have the same bits, prepared and converted."""
    made = model("llama", "eager")
    scale: Any = {"scale": 2.0**-4} if name in STATIC else {}
    quantize_(made, QATConfig(KVCacheConfig(name, **scale), step="prepare"))
    ids = torch.randint(1, 97, (1, 12), device=CUDA)
    with torch.no_grad():
        plain = made(ids, use_cache=False).logits
        cached = made(ids, use_cache=True)
        assert torch.equal(plain, cached.logits)
        quantize_(made, QATConfig(step="convert"))
        assert torch.equal(made(ids, use_cache=True).logits, plain)


def test_an_operation_on_bytes_decodes_them() -> None:
    f, x = get_kv_format("int8-token-head"), rows(64, 1, 2, 5)
    coded = packed.Coded(kv.pack(x, f, None), packed.New(x[:, :, :1], f, None))
    values = kv.values(x, f, None)
    assert coded.shape == x.shape and coded.dtype == BF16 and coded.device.type == "cuda"
    assert torch.equal(coded[:, :, 1:3] * 2, values[:, :, 1:3] * 2)
    assert torch.equal(copy.copy(coded).decoded(), values)


def test_training_on_a_gpu_sees_the_writers_values() -> None:
    f = get_kv_format("int8-token-head")
    made = model("llama").train()
    quantize_(made, QATConfig(KVCacheConfig(f.name), step="prepare"))
    ids = torch.randint(1, 97, (1, 12), device=CUDA)
    eager = made(ids, labels=ids, use_cache=False).loss
    eager.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
    compiled = torch.compile(made.eval(), fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(ids, use_cache=False).logits, made(ids, use_cache=False).logits)
