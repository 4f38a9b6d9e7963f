"""Bits of prepared KV caches where PyTorch runs a model otherwise: compiled, by flex attention, in other batches."""

import pytest
import torch
from support.kv_models import IDS, SOME_SLOW, generated, of, prepared, recorded

from aoquant import QATConfig, quantize_
from aoquant.formats import get_kv_format
from aoquant.formats.kv import KV_NAMES
from aoquant.kv import hook
from aoquant.ops import kv
from aoquant.report.measure import sqnr

X = torch.randn(2, 3, 17, 64, generator=torch.Generator().manual_seed(0)).mul(3).bfloat16()
X[0, 0, 0], X[0, 0, 1, 3], X[1, 1, 2] = 0, 1e4, 1e-7
QUICK = ("fp8",)


def scale_of(name: str) -> torch.Tensor | None:
    return torch.tensor([of(name)["scale"]]) if get_kv_format(name).static else None


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize("name", KV_NAMES)
def test_a_token_and_head_has_its_own_bytes(name: str, role: str) -> None:
    """Alone, in another order, in another layout, or in another batch."""
    format, scale = get_kv_format(name, role), scale_of(name)
    whole = format.pack(X, scale)
    assert torch.equal(whole, torch.cat([format.pack(x, scale) for x in X.split(1)]))
    assert torch.equal(whole, torch.cat([format.pack(x, scale) for x in X.split([1, 9, 7], 2)], 2))
    assert torch.equal(whole, torch.cat([format.pack(x, scale) for x in X.split(1, 1)], 1))
    assert torch.equal(whole.flip(2), format.pack(X.flip(2), scale))
    strided = X.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(whole, format.pack(strided, scale))


@pytest.mark.parametrize("name", KV_NAMES)
def test_tokens_are_written_behind_those_that_are_there(name: str) -> None:
    """Other bytes stay, and the number of heads says nothing of the number of tokens."""
    format, scale = get_kv_format(name), scale_of(name)
    whole = format.pack(X, scale)
    room = torch.full((2, 3, 20, whole.shape[3]), 77, dtype=torch.uint8)
    for at, count in ((2, 1), (3, 9)):
        kv.pack_into(room, at, X[:, :, at : at + count], format, scale)
    assert torch.equal(room[:, :, 2:12], whole[:, :, 2:12])
    assert (room[:, :, :2] == 77).all() and (room[:, :, 12:] == 77).all()


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in KV_NAMES])
def test_inductor_writes_the_same_values(name: str) -> None:
    format, scale = get_kv_format(name), scale_of(name)
    eager, compiled = X.clone().requires_grad_(), X.clone().requires_grad_()
    torch._dynamo.reset()
    want = hook.fake(eager, format, scale)
    got = torch.compile(lambda x: hook.fake(x, format, scale), fullgraph=True)(compiled)
    assert torch.equal(got, want)
    got.backward(X)
    assert torch.equal(compiled.grad, X)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in KV_NAMES])
def test_a_model_trains_in_one_graph(name: str) -> None:
    """aot_eager adds up the gradients of a residual in another order, so they are equal but for roundings."""
    eager, compiled = (prepared("llama", "sdpa", **of(name)).train() for _ in range(2))
    torch._dynamo.reset()
    want = eager(IDS, labels=IDS, use_cache=False).loss
    got = torch.compile(compiled, fullgraph=True, backend="aot_eager")(IDS, labels=IDS, use_cache=False).loss
    assert torch.equal(got, want)
    want.backward()
    got.backward()
    for (fqn, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert (p.grad - q.grad).float().norm() <= 0.02 * p.grad.float().norm() > 0, fqn


@pytest.mark.slow
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("family", SOME_SLOW)
def test_every_family_compiles_in_one_graph(family: str, converted: bool) -> None:
    made = prepared(family)
    if converted:
        quantize_(made, QATConfig(step="convert"))
    torch._dynamo.reset()
    with torch.no_grad():
        want = made(IDS, use_cache=False).logits
        assert torch.equal(want, torch.compile(made, fullgraph=True, backend="aot_eager")(IDS, use_cache=False).logits)


@pytest.mark.slow  # inductor compiles flex attention; for one query of a window, and for latents, it fails on a CPU
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_flex_attention(family: str) -> None:
    made = prepared(family, "flex_attention")
    plain, values = recorded(made, use_cache=False)
    cached, same = recorded(made, use_cache=True)
    assert torch.equal(plain.logits, cached.logits) and all(map(torch.equal, values, same))
    if family != "gemma3":
        tokens, logits, _ = generated(made)
        quantize_(made, QATConfig(step="convert"))
        assert all(map(torch.equal, generated(made)[:2], (tokens, logits)))


@pytest.mark.parametrize("name", KV_NAMES)
def test_a_tokens_bytes_follow_from_its_keys_and_values(name: str) -> None:
    """By sdpa, whose kernels depend on the number of queries: decoding stores what these keys and values give."""
    made = prepared("llama", "sdpa", **of(name))
    quantize_(made, QATConfig(step="convert"))
    seen = []
    packed = type(get_kv_format(name)).pack

    def record(self, x, scale=None):
        seen.append(packed(self, x, scale))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(type(get_kv_format(name)), "pack", record)
        cache = made(IDS[:, :9]).cache
        for i in range(9, 12):
            made(IDS[:, i : i + 1], past_key_values=cache)
    layers = len(cache.layers)
    for i, layer in enumerate(cache.layers):
        for side, held in enumerate((layer.keys, layer.values)):
            steps = seen[2 * i + side :: 2 * layers]
            assert torch.equal(torch.cat(steps, 2), held[:, :, :12])


def test_what_an_engine_computes_in_fp8_beside_the_cache() -> None:
    """docs/kv-cache.md's numbers: vLLM's Triton attention casts queries, and P times 256, to e4m3 as well."""
    generator, f = torch.Generator().manual_seed(0), get_kv_format("fp8")
    q, k, v = ((torch.randn(8, 512, 128, generator=generator) * s).bfloat16() for s in (1.5, 1.5, 1.0))
    scale, causal = torch.tensor(2.0**-4), torch.ones(512, 512).tril().bool()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, casts: bool = False) -> torch.Tensor:
        s = (q.double() @ k.double().mT * 128**-0.5).masked_fill(~causal, -1e30)
        p = (s - s.amax(-1, keepdim=True)).exp()
        rounded = f.read(f.write(p.float() * 256)[0], None, torch.float32).double() / 256 if casts else p
        return (rounded @ v.double()) / p.sum(-1, keepdim=True)

    q8, k8, v8 = (f.read(f.write(x, scale)[0], scale, torch.bfloat16) for x in (q, k, v))
    engine = attend(q8, k8, v8, casts=True)
    alone, queries_too = (sqnr(engine, attend(x, k8, v8)) for x in (q, q8))
    assert (round(alone, 1), round(queries_too, 1)) == (27.5, 38.0)
