"""A teacher's top-k log-probabilities: the loss against them, and their folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import distillation_loss, tiny_llama
from support.two_ranks import make
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

from aoquant.files.safetensors_file import header
from aoquant.integrations import teacher_cache
from aoquant.integrations.finetune import finetune
from aoquant.integrations.launched import Ranks
from aoquant.integrations.teacher_cache import TeacherCache, TopK, opened, top_k, top_k_loss
from aoquant.integrations.text import assets

V, TOKENS = 40, 24
BLOCKS = torch.arange(12 * 16).view(12, 16) % 31
TOKENIZER = AutoTokenizer.from_pretrained(assets())


def pair(scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits of a student, with gradients, and of a teacher near it."""
    torch.manual_seed(0)
    teacher = torch.randn(TOKENS, V) * scale
    return (teacher + torch.randn(TOKENS, V)).requires_grad_(), teacher


def gradient(loss: Tensor, student: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, student)
    return found * TOKENS  # of each token's own loss


@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0], ids=["flat", "usual", "sure"])
def test_with_the_whole_vocabulary_it_is_the_full_divergence(scale: float) -> None:
    student, teacher = pair(scale)
    full, kept = distillation_loss(student[None], teacher[None]), top_k_loss(student, top_k(teacher, V))
    torch.testing.assert_close(kept, full, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient(kept, student), gradient(full, student), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 4, 16, V - 1])
@pytest.mark.parametrize("scale", [0.1, 3.0], ids=["flat", "usual"])
def test_a_small_k_is_short_of_it_by_the_divergence_within_the_rest(k: int, scale: float) -> None:
    student, teacher = pair(scale)
    target = top_k(teacher, k)
    full, kept = distillation_loss(student[None], teacher[None]), top_k_loss(student, target)
    tail = torch.ones(TOKENS, V, dtype=torch.bool).scatter(1, target.ids.long(), False)
    inside = [x.masked_fill(~tail, -torch.inf).log_softmax(-1) for x in (teacher, student)]
    missed = torch.where(tail, inside[0].exp() * (inside[0] - inside[1]), 0).sum(-1) * target.rest.exp()
    assert (missed >= -1e-7).all()
    torch.testing.assert_close(kept + missed.mean(), full, rtol=1e-5, atol=1e-6)
    distance = (gradient(kept, student) - gradient(full, student)).abs().sum(-1)
    assert (distance <= 2 * target.rest.exp() + 1e-5).all()


def test_a_student_who_is_the_teacher_has_no_loss_and_no_gradient() -> None:
    _, teacher = pair()
    student = teacher.clone().requires_grad_()
    loss = top_k_loss(student, top_k(teacher, 3))
    assert abs(loss.item()) < 1e-6 and gradient(loss, student).abs().max() < 1e-6


def test_tokens_that_a_teacher_rules_out_and_a_sure_student_stay_finite() -> None:
    student, teacher = pair()
    teacher[:, 5:] = -torch.inf
    sure = (student.detach() * 100).requires_grad_()
    loss = top_k_loss(sure, top_k(teacher, 8))
    assert loss.isfinite() and gradient(loss, sure).isfinite().all()


def llama(recipe: str | None = None, seed: int = 0) -> LlamaForCausalLM:
    return tiny_llama(recipe, V, seed=seed).eval()


def cached(
    folder: Path, used: Tensor | None = None, k: int = 8, ranks: Ranks | None = None, **other: Any
) -> TeacherCache:
    given: dict[str, Any] = {"teacher": llama(seed=1), "tokenizer": TOKENIZER, "blocks_BT": BLOCKS} | other
    cache = opened(folder, **given, k=k, ranks=ranks or Ranks())
    given.pop("tokenizer")
    used = torch.arange(len(given["blocks_BT"])) if used is None else used
    cache.fill(**given, used=used, ranks=ranks or Ranks())
    return cache


def tune(teacher: Any) -> list[float]:
    model = llama("int8-weight", seed=1)
    return finetune(
        model, BLOCKS, steps=4, batch_size=2, learning_rate=1e-2, loss="kl", teacher=teacher, seed=3, label="tune"
    )


def test_a_student_trains_on_it_as_beside_its_teacher(tmp_path: Path) -> None:
    """The whole vocabulary: equal up to the order of sums. Less of it: near."""
    beside = tune(llama(seed=1))
    assert tune(cached(tmp_path / "all", k=V)) == pytest.approx(
        beside, rel=1e-3, abs=1e-4
    )  # bfloat16 rounds gradients in another order
    few = tune(cached(tmp_path / "few", k=8))
    assert few != beside and all(a < b * 1.01 for a, b in zip(few, beside, strict=True))


def test_files_hold_what_the_teacher_gives(tmp_path: Path) -> None:
    cache, teacher = cached(tmp_path), llama(seed=1)
    with torch.no_grad():
        logits = teacher(input_ids=BLOCKS[[7, 2]]).logits.float()
    found = cache.read(torch.tensor([7, 2]), torch.device("cpu"))
    expected = top_k(torch.cat([teacher(input_ids=BLOCKS[[i]]).logits[0] for i in (7, 2)]).detach(), 8)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    probabilities = F.softmax(logits, -1).flatten(0, 1).gather(1, found.ids.long())
    torch.testing.assert_close(found.logprobs.exp(), probabilities, rtol=2e-2, atol=1e-3)


def test_it_goes_on_after_a_stop_and_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_cache, "_SHARD_BYTES", 2 * 16 * (8 * 8 + 4))  # two blocks in a file
    calls: list[int] = []
    stop = 5

    def counted(logits_NV: Tensor, k: int) -> TopK:
        calls.append(k)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return top_k(logits_NV, k)

    monkeypatch.setattr(teacher_cache, "top_k", counted)
    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, torch.arange(8))
    stop = 0
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    cached(tmp_path, torch.arange(8))
    assert len(calls) == 5 + 4  # the unfinished file anew, and the last one
    cached(tmp_path, torch.arange(8).repeat(2))
    assert len(calls) == 9
    grown = cached(tmp_path, torch.tensor([11, 3]))  # another order, and one more block
    assert len(calls) == 10 and sorted(grown.places) == [*range(8), 11]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"teacher": llama(seed=2)}, "model"),
        ({"blocks_BT": BLOCKS.roll(1, 1)}, "text"),
        ({"blocks_BT": BLOCKS.view(24, 8)}, "length of blocks"),
        ({"k": 4}, "top k"),
    ],
    ids=["teacher", "text", "window", "k"],
)
def test_a_cache_of_something_else_is_refused(other: dict[str, Any], named: str, tmp_path: Path) -> None:
    cached(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.glob("*.safetensors")}
    with pytest.raises(ValueError, match=rf"another .*{named}.*choose another"):
        cached(tmp_path, **other)
    assert {p: p.read_bytes() for p in tmp_path.glob("*.safetensors")} == before


def test_a_cache_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    cached(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(assets())
    tokenizer.add_tokens(["one more"])
    with pytest.raises(ValueError, match="another tokenizer"):
        cached(tmp_path, tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["ids", "logprobs"])
def test_damage_is_noticed(name: str, tmp_path: Path) -> None:
    cache = cached(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    stored = header(path).tensors[name]
    stored.write(torch.full((1,), 1000, dtype=stored.dtype), 8)
    with pytest.raises(ValueError, match=rf"{path.name}: is damaged \(block 0\)"):
        cache.read(torch.tensor([0]), torch.device("cpu"))
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match="damaged or truncated"):
        cached(tmp_path)


@pytest.mark.parametrize("k", [0, V + 1])
def test_k_must_be_within_the_vocabulary(k: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"must be in 1 .. {V} .* got {k}"):
        cached(tmp_path, k=k)


def test_a_folder_at_work_is_refused(tmp_path: Path) -> None:
    lock = teacher_cache.FileLock(tmp_path / ".lock")
    with lock, pytest.raises(ValueError, match="in use by another run"):
        cached(tmp_path)


def test_what_the_disk_has_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block takes 8 k + 4 bytes for each of its 16 tokens; what is there already takes none."""
    folder, free = tmp_path / "new" / "cache", [2 * 16 * (8 * 4 + 4) - 1]
    monkeypatch.setattr(teacher_cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    with pytest.raises(ValueError, match="cache: needs"):
        cached(folder, torch.arange(2), k=4)
    assert not folder.parent.exists()
    free[0] += 1
    with pytest.raises(ValueError, match="cache: needs"):
        cached(folder, torch.arange(3), k=4)
    assert not list(folder.glob("*.safetensors"))
    cached(folder, torch.arange(2), k=4)
    cached(folder, torch.tensor([[0, 2], [3, 2]]), k=4)
    with pytest.raises(ValueError, match="cache: needs"):
        cached(folder, k=4)


def ranks_fill(rank: int, folder: Path) -> None:
    teacher_cache._SHARD_BYTES = 1  # a block in a file
    cache = cached(folder / "cache", torch.arange(6), ranks=Ranks(rank, 2, launched=True))
    alone = cached(folder / f"alone-{rank}", torch.arange(6))
    rows, device = torch.arange(6), torch.device("cpu")
    assert all(torch.equal(a, b) for a, b in zip(cache.read(rows, device), alone.read(rows, device), strict=True))
    assert len(list((folder / "cache").glob("*.safetensors"))) == 6


def test_two_ranks_share_the_work() -> None:
    make({"fill": ranks_fill})
