"""Chunked losses: the plain loss and its gradients, for every kind of output head, in the memory of one chunk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gpu import captured, loss_device
from support.meters import peak_bytes
from support.models import distillation_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM, masking_utils

from aoquant import QATConfig, quantize_
from aoquant.integrations import losses

kernel = pytest.fixture(loss_device)
IDS = torch.arange(2 * 21).view(2, 21) * 7 % 96
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "gemma3_text": {"tie_word_embeddings": True},  # an embedding that scales
    "gemma2": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {},
    "mixtral": {"num_local_experts": 2},
}


def model_of(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**SIZES | FAMILIES[family] | changes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def by_chunks(model: Any, teacher: Any, kind: str, rows: int) -> Tensor:
    ids = IDS.to(model.device)
    hidden = losses.hidden_states(model, input_ids=ids)
    targets = losses.next_tokens(ids).flatten()
    seen = losses.hidden_states(teacher, input_ids=ids).flatten(0, 1).detach()

    def of(logits: Tensor, at: slice) -> Tensor:
        if kind == "ce":
            return losses.cross_entropy(logits, targets[at], 1 / 40)
        return losses.kl_divergence(logits, losses.logits_of(teacher, seen[at]).detach(), 1 / 42)

    return losses.chunked_loss(model, hidden, of, rows)


def plain(model: Any, teacher: Any, kind: str) -> Tensor:
    ids = IDS.to(model.device)
    if kind == "ce":
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    with torch.no_grad():
        target = teacher(input_ids=ids).logits
    return distillation_loss(model(input_ids=ids).logits, target)


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    value = loss()
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(model: Any, teacher: Any, kind: str, rtol: float) -> None:
    wanted = gradients(model, lambda: plain(model, teacher, kind))
    for rows in (5, 64):
        value, found = gradients(model, partial(by_chunks, model, teacher, kind, rows))
        torch.testing.assert_close(value, wanted[0].float(), rtol=min(rtol, 1e-3), atol=1e-6)
        assert found.keys() == wanted[1].keys()
        for name, grad in found.items():
            error = (grad.double() - wanted[1][name].double()).norm() / wanted[1][name].double().norm()
            assert error < rtol, (name, rows, float(error))


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_the_plain_loss(family: str, kind: str) -> None:
    assert_equal(model_of(family), model_of(family, seed=1), kind, 1e-5)


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("recipe", ["int8-weight", "nvfp4", "int4-g32"])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gemma2", False)])
def test_equal_the_plain_loss_with_a_quantised_head(family: str, tied: bool, recipe: str, kind: str) -> None:
    """In bfloat16 the gradients of the hidden states are rounded in another order."""
    model = model_of(family, torch.bfloat16, tie_word_embeddings=tied)
    chosen = ("lm_head", "model.embed_tokens") if tied else ("lm_head",)
    quantize_(model, QATConfig(recipe), lambda m, fqn: fqn in chosen)
    assert type(model.lm_head) is not nn.Linear
    assert_equal(model, model_of(family, torch.bfloat16, seed=1), kind, 0.02)


def test_gradients_of_many_chunks_are_rounded_once(device: torch.device) -> None:
    """In bfloat16 a sum of 32 chunks that are rounded first is 2.6e-3 from the gradient of one chunk."""
    torch.manual_seed(0)
    model = model_of("llama", torch.bfloat16).to(device)
    hidden = torch.randn(1, 256, 32, dtype=torch.bfloat16, device=device)
    targets = torch.arange(256, device=device) % 96

    def of(logits: Tensor, at: slice) -> Tensor:
        return losses.cross_entropy(logits, targets[at])

    grads = []
    for rows in (256, 8):
        _, found = gradients(model, partial(losses.chunked_loss, model, hidden, of, rows))
        grads.append(found["lm_head.weight"].float())
    assert (grads[0] - grads[1]).norm() / grads[0].norm() < 1e-3


def test_under_autocast_equal_the_plain_loss(device: torch.device) -> None:
    with torch.autocast(device.type, torch.bfloat16):
        assert_equal(model_of("llama").to(device), model_of("llama", seed=1).to(device), "kl", 0.02)


def test_a_weight_that_the_model_reads_beside_its_head_gets_both_gradients() -> None:
    class Beside(type(model_of("llama"))):  # type: ignore[misc]
        def forward(self, *args: Any, **inputs: Any) -> Any:
            output = super().forward(*args, **inputs)
            output.logits = output.logits + self.lm_head.weight.sum(-1)
            return output

    models = [model_of("llama", seed=seed) for seed in (0, 1)]
    for model in models:
        model.__class__ = Beside
    with torch.no_grad():
        assert models[0](input_ids=IDS).logits.shape == (2, 21, 96)
    assert_equal(*models, "kl", 1e-5)


class ReadsIds(LlamaForCausalLM):
    """A family whose forward scales logits by the number of texts."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits * len(input_ids)
        return output


def test_the_head_of_a_forward_that_reads_its_ids_meets_one_text() -> None:
    model = ReadsIds(model_of("llama").config).eval()
    hidden = losses.hidden_states(model, input_ids=IDS[:1])
    torch.testing.assert_close(losses.logits_of(model, hidden[0]), model(IDS[:1]).logits[0])


def test_tokens_that_are_not_scored_add_nothing() -> None:
    targets = losses.next_tokens(torch.tensor([[2, 5, 6, 2, 7]]), ignored=2)
    assert targets.tolist() == [[5, 6, losses.IGNORED, 7, losses.IGNORED]]
    logits = torch.randn(5, 9)
    logits[2], logits[4, 0] = torch.nan, -torch.inf  # of tokens that are not scored
    logits.requires_grad_()
    loss = losses.cross_entropy(logits, targets[0], 1 / 3)
    loss.backward()
    same = logits.detach().clone().requires_grad_()
    wanted = F.cross_entropy(same, targets[0])
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    scored = targets[0] != losses.IGNORED
    torch.testing.assert_close(logits.grad[scored], same.grad[scored])
    assert not logits.grad[~scored].any()


@pytest.mark.parametrize("token", [-1, 9])
def test_a_target_that_is_no_token_hides_nothing(token: int) -> None:
    logits = torch.randn(2, 9, requires_grad=True)
    loss = losses.cross_entropy(logits, torch.tensor([1, token]))
    loss.backward()
    assert loss.isnan() and logits.grad[1].isnan().all() and logits.grad[0].isfinite().all()


@pytest.mark.parametrize("targets", [torch.zeros(2, 1), torch.zeros(1), torch.zeros(3), torch.zeros(2, device="meta")])
def test_targets_that_are_not_one_for_each_row_are_refused(targets: Tensor) -> None:
    with pytest.raises(ValueError, match="cross_entropy"):
        losses.cross_entropy(torch.randn(2, 9), targets.long())


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2"])
def test_by_the_kernel_equal_the_plain_loss(kernel: torch.device, family: str, kind: str) -> None:
    assert_equal(model_of(family).to(kernel), model_of(family, seed=1).to(kernel), kind, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_a_cuda_graph_holds_the_chunks_of_the_kernel(kernel: torch.device, kind: str) -> None:
    """Replayed on other hidden states it gives what the eager step gives for these."""
    model = model_of("gemma3_text", torch.bfloat16).to(kernel)
    hidden, teacher = torch.randn(2, 1, 42, 32, dtype=torch.bfloat16, device=kernel)
    hidden.requires_grad_()
    targets = torch.arange(42, device=kernel)

    def step() -> tuple[Tensor, ...]:
        def of(logits: Tensor, at: slice) -> Tensor:
            if kind == "ce":
                return losses.cross_entropy(logits, targets[at], 1 / 42)
            return losses.kl_divergence(logits, losses.logits_of(model, teacher[0, at]).detach(), 1 / 42)

        loss = losses.chunked_loss(model, hidden, of, 8)
        return loss.detach(), *torch.autograd.grad(loss, [hidden, model.get_output_embeddings().weight])

    graph, results = captured(step)
    with torch.no_grad():
        hidden.copy_(torch.randn_like(hidden))
    graph.replay()
    for got, wanted in zip(results, step(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.gpu
@pytest.mark.no_poison
@pytest.mark.parametrize(("kind", "matrices"), [("kl", 3), ("ce", 2)])
def test_the_peak_at_gemmas_head_is_some_matrices_of_logits_and_the_float32_sum(
    kernel: torch.device, kind: str, matrices: int
) -> None:
    """Its head is 262144 x 640; these are 16 chunks of 256 tokens. Logits, the teacher's and the gradient; or, at the
    end, the rounded gradient of the head.
    """
    sizes = {"vocab_size": 262144, "hidden_size": 640, "head_dim": 64}
    model = model_of("gemma3_text", torch.bfloat16, **sizes).to(kernel)
    weight = model.get_output_embeddings().weight
    hidden, teacher = torch.randn(2, 1, 4096, 640, dtype=torch.bfloat16, device=kernel)
    hidden.requires_grad_()

    targets = torch.arange(4096, device=kernel)

    def of(logits: Tensor, at: slice) -> Tensor:
        if kind == "ce":
            return losses.cross_entropy(logits, targets[at], 1 / 4096)
        return losses.kl_divergence(logits, losses.logits_of(model, teacher[0, at]).detach(), 1 / 4096)

    losses.chunked_loss(model, hidden, of, 256).backward()  # cuBLAS's workspace
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    losses.chunked_loss(model, hidden, of, 256).backward()
    made = torch.cuda.max_memory_allocated() - before
    assert made <= 1.05 * (max(matrices * 256 * 262144 * 2, 2 * weight.numel()) + 4 * weight.numel())


def test_logits_of_two_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 9\).*\(2, 8\)"):
        losses.kl_divergence(torch.randn(2, 9), torch.randn(2, 8))


def test_a_large_gpu_has_larger_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for memory, rows in ((8 << 30, 512), (32 << 30, 1024)):
        about = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, about=about: about)
        assert losses.chunk_rows(262_144, device="cuda") == rows
        assert losses.chunk_rows(262_144, rows, "cuda") == rows
        assert losses.chunk_rows(262_144, rows + 1, "cuda") == rows // 2
        assert losses.chunk_rows(262_144, device="cpu") == 512


@pytest.mark.parametrize(("kind", "whole"), [("kl", 3), ("ce", 2)])
def test_rows_of_a_loss_are_made_a_block_at_a_time(kind: str, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside logits, of a teacher too, and a gradient there are a few blocks of 4 rows of 64."""
    logits = torch.randn(64, 4096, requires_grad=True)
    monkeypatch.setattr(losses, "BLOCK_BYTES", 4 * logits[:4].numel())

    def run() -> Tensor:
        if kind == "ce":
            return losses.cross_entropy(logits, torch.arange(64))
        return losses.kl_divergence(logits, logits.detach().flip(0))

    assert peak_bytes(run) <= (whole + 0.5) * logits.nbytes


@pytest.mark.parametrize(("kind", "most"), [("kl", 1.3), ("ce", 1.6)])
def test_peak_where_the_heads_gradient_is_as_large_as_a_chunk(
    kind: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the proportions of Gemma 3 270M: 640 columns and 512 rows of a chunk. A chunk of cross entropy alone is less
    than the float32 sum of the head's gradient.
    """
    torch.manual_seed(0)
    vocabulary, rows, width = 4096, 64, 80
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * vocabulary * rows)
    monkeypatch.setattr(losses, "BLOCK_BYTES", vocabulary * rows // 2)
    model = model_of("llama", torch.bfloat16, vocab_size=vocabulary, hidden_size=width, head_dim=40)
    hidden = torch.randn(1, rows * 8, width, dtype=torch.bfloat16, requires_grad=True)
    teacher, targets = torch.randn_like(hidden[0]), torch.arange(rows * 8)

    def of(logits: Tensor, at: slice) -> Tensor:
        if kind == "ce":
            return losses.cross_entropy(logits, targets[at])
        return losses.kl_divergence(logits, losses.logits_of(model, teacher[at]).detach())

    def run(tokens: int) -> int:
        model.zero_grad()
        made = peak_bytes(lambda: losses.chunked_loss(model, hidden[:, :tokens], of).backward())
        return made - model.lm_head.weight.nbytes  # a view of which is among what the meter sees

    assert run(rows * 8) <= most * run(rows)


@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_many_chunks_peak_as_one_does(kind: str) -> None:
    """Beside the gradient of the head, whose sum is in float32."""
    torch.manual_seed(0)
    model = model_of("llama", torch.bfloat16)
    vocabulary, rows, chunks = 8192, 64, 6
    model.resize_token_embeddings(vocabulary)
    hidden = torch.randn(1, rows * chunks, 32, dtype=torch.bfloat16, requires_grad=True)
    targets, teacher = torch.arange(rows * chunks), torch.randn(1, rows * chunks, 32, dtype=torch.bfloat16)

    def of(logits: Tensor, at: slice) -> Tensor:
        if kind == "ce":
            return losses.cross_entropy(logits, targets[at])
        return losses.kl_divergence(logits, losses.logits_of(model, teacher[0, at]).detach())

    def run(tokens: int) -> int:
        model.zero_grad()
        return peak_bytes(lambda: losses.chunked_loss(model, hidden[:, :tokens], of, rows).backward())

    assert run(rows * chunks) <= 1.3 * run(rows)
    logits = model.get_output_embeddings()(hidden)[0]
    assert run(rows * chunks) < peak_bytes(lambda: F.cross_entropy(logits.float(), targets).backward()) / 2


class ReadsBack(TorchDispatchMode):
    """Raise where an operator reads a value back from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read back"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_reads_no_value_back(family: str) -> None:
    """A read-back would keep the host from issuing the next kernels while a GPU computes the loss."""
    model, teacher = model_of(family), model_of(family, seed=1)
    wanted = {kind: by_chunks(model, teacher, kind, 5).detach() for kind in ("kl", "ce")}
    for m in (model, teacher):
        m.config.pad_token_id = None  # GPT-2 looks for it
        if family == "mixtral":
            m.set_experts_implementation("batched_mm")  # others count the tokens of each expert
    with ReadsBack():
        found = {kind: by_chunks(model, teacher, kind, 5).detach() for kind in wanted}
    torch.testing.assert_close(found, wanted)


def test_rows_of_several_texts_are_still_found() -> None:
    """Where position ids say so, inside a call of one text each, too; in another thread meanwhile; after an error."""
    model, inner, two = model_of("llama"), model_of("llama"), torch.tensor([[0, 1, 2, 0, 1]])
    apart = losses.hidden_states(model, input_ids=IDS[:1, :5], position_ids=two)[:, 3:]
    torch.testing.assert_close(apart, losses.hidden_states(model, input_ids=IDS[:1, 3:5]))
    found: list[Any] = []

    def elsewhere(*_: Any) -> None:
        with ThreadPoolExecutor(1) as threads:
            found.append(threads.submit(masking_utils.find_packed_sequence_indices, two).result())
        inside = losses.hidden_states(inner, input_ids=IDS[:1, :5], position_ids=two)[:, 3:]
        torch.testing.assert_close(inside, apart)
        assert masking_utils.find_packed_sequence_indices(two) is None
        raise KeyError

    model.base_model.layers[0].register_forward_pre_hook(elsewhere)
    with pytest.raises(KeyError):
        losses.hidden_states(model, input_ids=IDS)
    found.append(masking_utils.find_packed_sequence_indices(two))
    assert [f.tolist() for f in found] == 2 * [[[0, 0, 0, 1, 1]]]
