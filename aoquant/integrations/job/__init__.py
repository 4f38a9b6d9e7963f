"""The main job: float, PTQ and QAT of one model under one recipe, measured, verified and saved.

    float -> PTQ -> QAT prepared -> QAT converted

By cross entropy the student learns the text too, so the float model is then fine-tuned on the same tokens for
comparison; distilled students have the float model itself as their ceiling.

lm-eval scores every stage with the same window and pages. The prepared and the converted model are compared layer by
layer, and the saved checkpoint is loaded again and must give the same logits, bit for bit. The plan is checked on the
whole model first. The same command goes on where an interrupt or a crash stopped it (`resuming.py`).
"""

import copy
import dataclasses
import functools
import gc
import math
import sys
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from aoquant import __version__
from aoquant._messages import folded
from aoquant.config import WeightConfig
from aoquant.export import check as check_export
from aoquant.export import export
from aoquant.formats.ggml import KINDS
from aoquant.integrations import teacher_cache
from aoquant.integrations.finetune import alias, check_batch, check_switch, finetune, order_of_blocks
from aoquant.integrations.hf import save_pretrained
from aoquant.integrations.job.models import (
    check_for_engine,
    chosen_layers,
    convert,
    load_checkpoint,
    load_float,
    model_bytes,
    prepare,
    prepare_calibrated,
    probe,
    why_not_run,
)
from aoquant.integrations.job.needs import fitting
from aoquant.integrations.job.options import GROUPS, Options, check_target, read_yaml, write_plan
from aoquant.integrations.job.records import RESULTS, check_fingerprint, environment, evaluation, logits_fingerprint
from aoquant.integrations.job.result import Result, Stage, recovered, recovered_share, write
from aoquant.integrations.job.resuming import Folder
from aoquant.integrations.job.training import PRESETS, SEARCH, best_rate, freeze, hold_out, validation_loss
from aoquant.integrations.launched import Ranks, joined
from aoquant.integrations.lm_eval import (
    Perplexity,
    check_hub,
    check_shares,
    check_window,
    check_within,
    evaluate,
    positions,
)
from aoquant.integrations.teacher_cache import TeacherCache
from aoquant.integrations.text import Documents, assets, described, find_pages, load_documents, token_blocks
from aoquant.linear.prepared import QATLayer
from aoquant.planning.choose import each
from aoquant.planning.coverage import coverage, listed
from aoquant.recipes import mixed
from aoquant.report import report, verify

FLOAT, TUNED, PTQ, PREPARED, CONVERTED = "float", "float, fine-tuned", "PTQ", "QAT, prepared", "QAT, converted"
_COMPARED = 2048  # tokens that reports run on, with all their logits
Score = Callable[[PreTrainedModel], Perplexity]


def run(o: Options) -> Result:
    """Run the whole job and write o.out/{report.md,.csv,.json,.png, float_against_quantized/, aoquant_run.json,
    checkpoint/}.

    Under torchrun or `accelerate launch` every rank calls it: fine-tunes are sharded (FSDP2), batches and scored
    documents are shared out, rank 0 verifies and writes, and all ranks return the result.

    Raises:
        ValueError: bad options, layers that cannot take the recipe or that o.export cannot hold, another run in o.out
            or at work there, or prepared and converted differ.
    """
    with joined(o.device) as ranks:
        ranks.share(o.check)
        ranks.share(lambda: check_batch(o.batch_size, ranks.size))
        ranks.share(lambda: check_shares(find_pages(o.wikitext, None), o.limit, ranks.size))
        with Folder(o, ranks) as folder:
            done = folder.finished()
            result = done if done is not None else _stages(o, folder, ranks)
            if (target := o.export) is None:
                return result
            written = ranks.share(lambda: export(o.out / "checkpoint", target, engine_format(mixed(o.recipe))))
            return dataclasses.replace(result, exported=written)


def engine_format(config: Any) -> str:
    """Return the layout of the engine that a config is for: ggml's blocks are llama.cpp's."""
    configs = [config for config in each(config) if isinstance(config, WeightConfig)]
    ggml = any(config.recipe().fprop_weight.format.standard in KINDS for config in configs)
    return "gguf" if ggml else "compressed-tensors"


def _stages(o: Options, folder: Folder, ranks: Ranks) -> Result:
    assert o.dtype is not None and o.preset is not None and o.loss is not None  # the options chose one of each
    if (needs := ranks.share(lambda: fitting(o, ranks.size))) is not None and ranks.first:
        print(needs, file=sys.stderr, flush=True)
    tokenizer, float_model = load_float(o.model, o.dtype, o.device)
    ranks.share(lambda: check_window(float_model, tokenizer, o.window))
    ranks.share(lambda: check_within("block", o.block, positions(float_model)))
    config, skipped = ranks.share(lambda: chosen_layers(float_model, o))
    for reason in folded(skipped.values()) if ranks.first else ():
        print(f"left out: {reason}", file=sys.stderr)
    if o.wikitext == "hub" and not folder.has(CONVERTED):
        ranks.share(check_hub)
    documents = [d for path in o.texts for d in load_documents(path)]
    blocks = token_blocks(documents, tokenizer, o.block, bos=o.bos, progress=ranks.first)
    layout = Documents.of(tokenizer, bos=o.bos, separate=o.separate_documents)
    ranks.share(lambda: layout.check(float_model))
    ranks.share(lambda: freeze(float_model, o.freeze))  # a wrong name is one error
    freeze(float_model, o.freeze)
    text, held_out = blocks, blocks[:0]
    if o.learning_rates or o.stop_at_gap is not None:
        ranks.share(lambda: len(hold_out(blocks, ranks.size)))  # too little text is one error, and no text is sent
        blocks, held_out = hold_out(blocks, ranks.size)
    steps = o.steps or PRESETS[o.preset].steps_for(len(blocks), o.batch_size, o.block)
    ranks.share(lambda: check_switch(o.fake_quant_after_n_steps, steps))
    if len(blocks) < o.batch_size and ranks.first:
        print(
            f"the text fills {len(blocks)} blocks, fewer than a step's {o.batch_size}: a step has some of them several times",
            file=sys.stderr,
        )
    cache = None
    if o.teacher_cache is not None:  # before anything is scored: it may be another text's
        cache = teacher_cache.opened(o.teacher_cache, float_model, tokenizer, text, o.teacher_top_k, ranks, layout)

    def score(model: PreTrainedModel) -> Perplexity:
        options: Any = {"wikitext": o.wikitext, "window": o.window, "limit": o.limit, "bos": o.bos}
        return evaluate(model, tokenizer, **options, shared=ranks.launched)

    @functools.cache
    def calibrated() -> PreTrainedModel:
        model = copy.deepcopy(float_model).to(o.device)
        texts = load_documents(o.calibrate) if o.calibrate else documents
        chosen = token_blocks(texts, tokenizer, o.block, bos=o.bos, progress=ranks.first) if o.calibrate else blocks
        prepare_calibrated(model, config, o, chosen, layout)
        return model

    def prepared(*, trains: bool) -> PreTrainedModel:
        """Return the float model prepared. What does not train shares the float model's memory."""
        if o.ptq != "nearest":
            return copy.deepcopy(calibrated())  # found once, although several stages start from it
        model = alias(float_model, frozen=trains).to(o.device)
        prepare(model, config, blocks, o.batch_size, layout)
        return model

    def stage_of(name: str, model: PreTrainedModel, speed: float = 0.0) -> Stage:
        return folder.stage(name, lambda: Stage(name, score(model), model_bytes(model), tokens_per_s=speed))

    def tune(model: PreTrainedModel, rate: float, steps: int = steps, **more: Any) -> tuple[list[float], float]:
        """Train; returns the losses, and the tokens a second of a step: the median, without the first one."""
        budget: Any = {"steps": steps, "batch_size": o.batch_size, "seed": o.seed, "blocks_BT": blocks}
        budget.update(micro_batch=o.micro_batch, documents=layout)
        rates: Any = {"learning_rate": rate, "final_learning_rate": o.final_rate(rate)}
        times: list[float] = []
        losses = finetune(model, shared=ranks.launched, times=times, **budget, **rates, **more)
        return losses, o.batch_size * o.block / median(times[1:] or times) if times else 0.0

    def loss_of(rate: float) -> float:
        model, short = prepared(trains=True), max(1, steps // SEARCH)
        after = o.fake_quant_after_n_steps * short // steps
        label = f"QAT {o.recipe} at {rate:g}"
        tune(model, rate, short, loss=o.loss, teacher=teacher, label=label, fake_quant_after_n_steps=after)
        return validation_loss(model, held_out, layout, shared=ranks.launched)

    def tuned_stage() -> Stage:
        tuned = alias(float_model, frozen=True).to(o.device)
        checkpoints = folder.checkpoints(TUNED)
        _, speed = tune(tuned, rate, loss="ce", teacher=None, label=TUNED, checkpoints=checkpoints)
        return Stage(TUNED, score(tuned), model_bytes(tuned), tokens_per_s=speed)

    if o.export is not None and not folder.has(FLOAT):
        untrained = prepared(trains=False)
        convert(untrained)
        ranks.share(lambda: check_export(untrained, engine_format(mixed(o.recipe)), tokenizer))
        del untrained
    folder.begin()
    stages = [stage_of(FLOAT, float_model)]
    goal = -math.inf
    if o.stop_at_gap is not None:
        float_loss = folder.number(
            "float on validation pages", lambda: validation_loss(float_model, held_out, layout, shared=ranks.launched)
        )
        goal = float_loss + o.stop_at_gap
    teacher: PreTrainedModel | TeacherCache = float_model
    if cache is not None:
        used = order_of_blocks(len(blocks), steps, o.batch_size, o.seed)
        cache.fill(float_model, text, used, ranks, layout)
        teacher = cache
        float_model.to("cpu")  # until the report
    rate = o.learning_rate or best_rate(o.learning_rates, lambda r: folder.number(f"rate {r:g}", lambda: loss_of(r)))
    if o.loss == "ce":
        stages.append(folder.stage(TUNED, tuned_stage))
        folder.forget(TUNED)
    ptq = folder.stage(PTQ, lambda: _ptq_stage(prepared(trains=False), score))

    student = prepared(trains=True)
    enough = (
        None if o.stop_at_gap is None else lambda m: validation_loss(m, held_out, layout, shared=ranks.launched) <= goal
    )
    losses, speed = tune(
        student,
        rate,
        loss=o.loss,
        teacher=teacher,
        label=f"QAT {o.recipe}",
        checkpoints=folder.checkpoints(PREPARED),
        fake_quant_after_n_steps=o.fake_quant_after_n_steps,
        enough=enough,
    )
    gc.collect()  # its shards, as at the end of a stage
    converted = alias(student)
    convert(converted)
    qat = stage_of(PREPARED, student, speed)
    if ptq.note:  # the kernel of the converted model does not run here
        as_prepared = Stage(CONVERTED, qat.perplexity, model_bytes(converted), ptq.note)
        deployed = folder.stage(CONVERTED, lambda: as_prepared)
    else:
        deployed = stage_of(CONVERTED, converted)
    stages += [ptq, qat, deployed]
    compared = max(1, min(o.batch_size, _COMPARED // o.block))
    batch = {"input_ids": blocks[:compared].to(converted.device)}
    took = f"{len(losses)} step{'s' * (len(losses) != 1)} of {o.batch_size} x {o.block} tokens"
    trained_on = f"{took} of {', '.join(map(described, o.texts))}, at {rate:g}"
    if o.ptq != "nearest":
        seen = described(o.calibrate) if o.calibrate else "the training text"
        trained_on += f"; PTQ by {o.ptq} on up to {o.samples} blocks of {seen}, where QAT began"
    if len(losses) < steps:
        trained_on += f"; QAT stopped early, at a gap of {o.stop_at_gap:g} nats a token: {steps} were planned"
    result = ranks.share(
        lambda: _finish(
            o, folder, stages, tokenizer, (float_model, student, converted), batch, skipped, ranks.size, trained_on
        )
    )
    folder.forget(PREPARED)
    return result


def _finish(
    o: Options,
    folder: Folder,
    stages: list[Stage],
    tokenizer: Any,
    models: tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel],
    batch: dict[str, Tensor],
    skipped: Mapping[str, str],
    ranks: int,
    trained_on: str,
) -> Result:
    """Verify, save and reload what was scored, and write the report. models: float, prepared and converted."""
    float_model, prepared, converted = models
    stage = {s.name: s for s in stages}
    not_run = bool(stage[PTQ].note)
    layers = verify(prepared, converted, batch, allow_not_run=not_run)
    save_pretrained(converted, o.out / "checkpoint", tokenizer)
    fingerprint = None if not_run else logits_fingerprint(converted, batch["input_ids"])
    covered = coverage(prepared)
    result = Result(
        recipe=o.recipe,
        out=o.out,
        stages=stages,
        recovered=recovered(*(stage[name].perplexity for name in (FLOAT, PTQ, CONVERTED))),
        min_sqnr_db=layers.min_sqnr,
        rows=len(layers.rows),
        reload=_reload(o, batch["input_ids"], fingerprint),
        coverage=str(covered),
        stay_float=listed(covered.float_weights),
        trained_on=trained_on,
        skipped=skipped,
    )
    record = {
        "options": o.as_json(),
        "probe_ids": batch["input_ids"].tolist(),
        "logits_sha256": fingerprint,
        "aoquant": __version__,
        "ranks": ranks,
        **environment(o.device),
    }
    deployed = prepared if not_run else converted
    if float_model.device != deployed.device:
        if deployed is converted:
            prepared.to("cpu")
        float_model.to(deployed.device)
    error = report(float_model, deployed, batch)
    seconds, peak = folder.lap()
    result = dataclasses.replace(result, finish_seconds=seconds, finish_peak_bytes=peak)
    write(result, layers, error, record)
    return result


def _ptq_stage(prepared: PreTrainedModel, score: Score) -> Stage:
    """PTQ: convert a model that was not trained.

    Where its kernel does not run on this machine the prepared model is scored, which computes the same, and the note
    says so.
    """
    deployed = alias(prepared)
    convert(deployed)
    layers = [m for m in prepared.modules() if isinstance(m, QATLayer)]
    own = all(isinstance(m.prepared.config.base_config, WeightConfig) for m in layers)  # which runs everywhere
    if not own and (reason := why_not_run(deployed)):
        note = f"its kernel does not run here ({reason.splitlines()[0]}); scored as prepared"
        return Stage(PTQ, score(prepared), model_bytes(deployed), note)
    return Stage(PTQ, score(deployed), model_bytes(deployed))


def _reload(o: Options, ids_BT: Tensor, fingerprint: str | None) -> str:
    if fingerprint is None:
        return "written; not run, its kernel does not run here"
    checkpoint = o.out / "checkpoint"
    _, model = load_checkpoint(checkpoint, str(ids_BT.device))
    if logits_fingerprint(model, ids_BT) != fingerprint:
        raise ValueError(f"{checkpoint}: the reloaded checkpoint gives other logits than the model that was saved")
    return "logits bit-equal"


__all__ = [
    "GROUPS",
    "RESULTS",
    "Options",
    "Result",
    "Stage",
    "assets",
    "check_fingerprint",
    "check_for_engine",
    "check_target",
    "engine_format",
    "evaluation",
    "load_checkpoint",
    "load_float",
    "prepare",
    "probe",
    "read_yaml",
    "recovered",
    "recovered_share",
    "run",
    "write_plan",
]
