"""The kernels of losses, on matrices of logits alone: near float64, and as torch where something is not finite."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.gpu import loss_device
from support.meters import peak_bytes
from torch import Tensor
from torch.nn import functional as F

from aoquant.integrations import losses

kernel = pytest.fixture(loss_device)


def test_a_token_that_the_teacher_rules_out_adds_nothing_and_nan_is_not_hidden() -> None:
    teacher = torch.tensor([[0.0, 1.0, -torch.inf]])
    student = torch.tensor([[0.3, -1.0, 0.5]], requires_grad=True)
    loss = losses.kl_divergence(student, teacher)
    loss.backward()
    p = teacher.softmax(-1)
    wanted = (p[:, :2] * (p[:, :2].log() - student.log_softmax(-1)[:, :2])).sum()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(student.grad, student.detach().softmax(-1) - p)
    assert losses.kl_divergence(torch.full((1, 3), torch.nan), teacher).isnan()


def in_float64(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the KL divergence of each row, and the probabilities of student and teacher."""
    log_q, log_p = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1), log_q.exp(), log_p.exp()


@pytest.mark.parametrize("vocabulary", [1, 50, 8192, 20011])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_is_near_float64(kernel: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    """Rows have strides, and the two matrices different ones. A second call has the same bits."""
    made = 5 * torch.randn(2, 5, vocabulary + 16, device=kernel)
    student = made[0].to(dtype)[:, :vocabulary].requires_grad_()
    teacher = (made[0] + made[1]).to(dtype)[:, :vocabulary].t().contiguous().t()
    weight = 0.37
    nats, q, p = in_float64(student.detach(), teacher)
    loss = losses.kl_divergence(student, teacher, weight)
    (grad,) = torch.autograd.grad(2 * loss, student)
    apart = 1 + (student.detach().float() - teacher.float()).abs().amax(-1)
    assert loss.dtype == torch.float32 and grad.dtype == dtype
    assert (loss.double() / weight - nats.sum()).abs() <= 2.0**-19 * apart.sum()
    wanted = 2 * weight * (q - p)
    rounding = torch.finfo(dtype).eps / (1 if kernel.type == "cpu" else 2)  # Triton's interpreter truncates bfloat16
    subnormal = 2.0**-24 if dtype == torch.float16 else 0
    bound = weight * 2.0**-15 * (q + p) + rounding * wanted.abs() + subnormal
    assert ((grad.double() - wanted).abs() <= bound).all()
    again = losses.kl_divergence(student, teacher, weight)
    assert torch.equal(again, loss) and torch.equal(torch.autograd.grad(2 * again, student)[0], grad)


@pytest.mark.parametrize("vocabulary", [1, 50, 20011])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cross_entropy_by_the_kernel_is_near_float64(kernel: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    """Rows and targets have strides; two rows are not scored, one of them with a NaN among its logits."""
    logits = (5 * torch.randn(7, vocabulary + 16, device=kernel)).to(dtype)[:, :vocabulary]
    targets = torch.randint(vocabulary, (7, 2), device=kernel)[:, 0]
    targets[[2, 5]], logits[5] = losses.IGNORED, torch.nan
    weight, scored = 0.37, targets != losses.IGNORED
    logits.requires_grad_()
    loss = losses.cross_entropy(logits, targets, weight)
    (grad,) = torch.autograd.grad(2 * loss, logits)
    assert loss.dtype == torch.float32 and grad.dtype == dtype and not grad[~scored].any()
    log_q = logits.detach()[scored].double().log_softmax(-1)
    one_hot = F.one_hot(targets[scored], vocabulary).double()
    torch.testing.assert_close(loss.double(), -weight * (log_q * one_hot).sum(), rtol=2e-6, atol=1e-6)
    wanted = 2 * weight * (log_q.exp() - one_hot)
    rounding = torch.finfo(dtype).eps  # Triton's interpreter truncates bfloat16
    bound = weight * 2.0**-15 * (log_q.exp() + one_hot) + rounding * wanted.abs()
    assert ((grad[scored].double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("vocabulary", [7, 9000])
def test_cross_entropy_by_the_kernel_treats_what_is_not_finite_as_torch_does(
    kernel: torch.device, vocabulary: int
) -> None:
    """A logit that is ruled out, infinite or NaN, the target's or another; then all that are ruled out. What is no
    token of the vocabulary has NaN.
    """
    for value in (-torch.inf, torch.inf, torch.nan):
        for at in (2, 3, slice(None)):
            logits = torch.randn(1, vocabulary, device=kernel)
            logits[0, at] = value
            logits.requires_grad_()
            target = torch.tensor([2], device=kernel)
            loss = losses.cross_entropy(logits, target)
            (grad,) = torch.autograd.grad(loss, logits)
            wanted, d = losses._cross_entropy_rows(logits.detach(), target)
            torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
            torch.testing.assert_close(grad, d, rtol=1e-4, atol=1e-6, equal_nan=True)
    for token in (-1, vocabulary):
        logits = torch.randn(1, vocabulary, device=kernel, requires_grad=True)
        loss = losses.cross_entropy(logits, torch.tensor([token]).to(kernel))
        assert loss.isnan() and torch.autograd.grad(loss, logits)[0].isnan().all()


@pytest.mark.parametrize("vocabulary", [7, 9000])
def test_the_kernel_treats_what_is_not_finite_as_torch_does(kernel: torch.device, vocabulary: int) -> None:
    """Student, teacher and both rule out a token; either has a NaN, or an infinite logit; either rules out every token,
    the student also where the teacher leaves one.
    """
    student, teacher = torch.randn(2, 10, vocabulary, device=kernel)
    for row, value in enumerate((-torch.inf, torch.nan, torch.inf)):
        student[3 * row, 2], teacher[3 * row + 1, 2] = value, value
    student[2, 2], teacher[2, 2] = -torch.inf, -torch.inf
    student[[5, 9]], teacher[8], teacher[9, 1:] = -torch.inf, -torch.inf, -torch.inf
    for row in range(len(student)):
        one, other = student[row : row + 1].requires_grad_(), teacher[row : row + 1]
        loss = losses.kl_divergence(one, other)
        (grad,) = torch.autograd.grad(loss, one)
        wanted, d = losses._kl_rows(one.detach(), other)
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(grad, d, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_the_kernels_are_given_rows_and_weighted(kind: str, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that compute the same in torch: value and gradient have the weight, whatever strides the logits have."""
    logits = torch.randn(2, 33, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mT
    student, teacher = (t.clone() if turned else t.contiguous() for t in logits)
    targets = torch.tensor([losses.IGNORED, *range(11)])
    loss_of = losses.kl_divergence if kind == "kl" else losses.cross_entropy
    aim, calls = teacher if kind == "kl" else targets, list[str]()

    def row_losses(x_NV: Tensor, aim: Tensor, ignored: int) -> Tensor:
        calls.append("losses")
        assert x_NV.stride(1) == 1 and aim.stride(-1) == 1 and ignored == losses.IGNORED
        if kind == "ce":
            return F.cross_entropy(x_NV, aim, ignore_index=ignored, reduction="none")[None]
        return F.kl_div(x_NV.log_softmax(-1), aim.log_softmax(-1), log_target=True, reduction="none").sum(-1)[None]

    def gradient(x_NV: Tensor, aim: Tensor, found_RN: Tensor, weight: Tensor, ignored: int) -> Tensor:
        calls.append("gradient")
        with torch.enable_grad():
            given = x_NV.detach().requires_grad_()
            (made,) = torch.autograd.grad(row_losses(given, aim, ignored).sum(), given)
        return made * weight

    found = []
    for has in (False, True):
        monkeypatch.setattr(losses, "has_triton", lambda _, has=has: has)
        monkeypatch.setattr(losses, "imported", lambda _: SimpleNamespace(row_losses=row_losses, gradient=gradient))
        given = student.clone().requires_grad_()
        value = loss_of(given, aim, 0.25)
        (3 * value).backward()
        found.append((value.detach().float(), given.grad))
        assert bool(calls) == has
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.no_poison
def test_the_kernel_writes_no_gradient_that_nobody_asked_for(kernel: torch.device) -> None:
    student, teacher = torch.randn(2, 4, 5000, device=kernel)
    assert peak_bytes(lambda: losses.kl_divergence(student, teacher)) < student.nbytes / 10


@pytest.mark.gpu
@pytest.mark.no_poison
def test_the_kernel_reaches_rows_beyond_two_to_the_31_elements(kernel: torch.device) -> None:
    vocabulary = 262144
    student = torch.empty((1 << 31) + vocabulary, dtype=torch.bfloat16, device=kernel)
    student = student.as_strided((3, vocabulary), (1 << 30, 1))
    student.copy_(torch.randn(3, vocabulary, device=kernel))
    teacher = torch.randn(3, vocabulary, device=kernel).bfloat16()
    found = []
    for logits in (student, student.clone(memory_format=torch.contiguous_format)):
        logits.requires_grad_()
        loss = losses.kl_divergence(logits, teacher)
        found.append((loss.detach(), *torch.autograd.grad(loss, logits)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
