"""`calibrate_ptq`: prepare a model, visit its blocks in order, and give each layer its codes.

The layers are prepared, so that recipes, scales, refusals and fitted transforms are those of QAT. They compute in high
precision until their turn comes. Then a layer gets its codes, packed or as a prepared layer under held scales, and what
follows sees its deployed output. Layers that share an input, such as q, k and v, share a Gram matrix. Rotations and
scales of input channels are folded into the float model first, which does not change what it computes.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from aoquant._messages import check_model, naming, progress, refuse, warn
from aoquant.calibrate import calibrate, uncalibrated
from aoquant.config import QATConfig, named
from aoquant.experts.prepared import QATReadExperts
from aoquant.formats import Encoded
from aoquant.linear import direct_reads, fast_path, replaced
from aoquant.linear.prepared import QATLinear
from aoquant.linear.tensor import PackedTensor
from aoquant.planning import caches
from aoquant.planning.changes import Change, restoring
from aoquant.planning.choose import Filter
from aoquant.planning.plan import plan_layer
from aoquant.ptq import blocks, clip, experts, fold, gptq, links, offload, resume, rotate
from aoquant.ptq.calibrate_config import CalibrateConfig
from aoquant.ptq.gram import InputGram, multiplied
from aoquant.ptq.prepare import prepare_layers
from aoquant.ptq.ptq_report import PTQReport, PTQRow
from aoquant.quantize import apply, give_weight, missing_kernels, refuse_recorded
from aoquant.report.measure import check_batch, undisturbed
from aoquant.targets.kernels import why_not_run
from aoquant.targets.target import packed_target
from aoquant.unpack import with_codes

ALL_EXPERTS = "its class does not show its router's choice, so all_experts is not for it: leave all_experts out"
NOT_SCALED = (
    "its method scales no inputs of stacked experts: add gptq or clip, leave the experts out, or give skip_incompatible=True to "
    "round them to the nearest"
)
ZERO = "its input was zero in all batches"
NOT_REACHED = "no batch reaches it: give batches that use every layer, or leave the layer out"


@torch.no_grad()
def calibrate_ptq(
    model: nn.Module,
    batches: Iterable[Any],
    config: Any,
    *,
    step: str | None = None,
    filter_fn: Filter | None = None,
    skip_incompatible: bool = False,
    checkpoint: str | Path | None = None,
    device: torch.device | str | None = None,
) -> PTQReport:
    """Quantise the linear layers of `model` in place, with codes that are chosen on calibration data.

    batches: each a tensor, positional arguments (tuple, list) or keyword arguments (dict). Tokens whose attention_mask
        is 0 do not count.
    config: a `CalibrateConfig`, or torchao's GPTQConfig, AWQConfig or SmoothQuantConfig. Where step is "prepare", its
        recipe may be a QATConfig.
    step: None packs the weights, as `quantize_` does with a PTQ config. "prepare" makes layers that train on: from the
        codes of "gptq" and "clip" under held scales, as `unpack_` does, so that convert without training gives the
        codes back; else from the folded or rotated weights, under scales that follow them.
        An expert of a stack sees its own tokens; a class without transformers' experts protocol is calibrated without
        the asymmetric target, and padding counts there.
    checkpoint: a folder that gets the codes of each finished block. The same call with it goes on where an earlier one
        stopped, and makes the same codes.
    device: where the blocks of the model are while they run, one at a time; the model and the inputs of blocks stay in
        host memory. So a model may be larger than a GPU. None: everything is where the model is.
    filter_fn, skip_incompatible: as `quantize_` has them. With the latter, layers whose scales cannot be folded are
        quantised without them, and the report says so.

    Raises:
        ValueError: naming each layer that cannot take its config, that no batch reaches, whose input holds NaN or Inf
            or is padding alone, whose scales cannot be held where step is "prepare", or whose weight is tied or
            sharded, or the modules that its method's scales or rotations cannot be folded into; or there are no
            batches; or checkpoint is of another model, config, data or version. The model is unchanged then.

    Example:

            aoquant.calibrate_ptq(model, batches, CalibrateConfig("int4-g128"))
    """
    check_model(model)
    refuse_recorded(model)
    if step not in (None, "prepare"):
        raise ValueError(f"calibrate_ptq: step is None or 'prepare', got {step!r}")
    given, asked = listed_batches(batches), CalibrateConfig.of(config)
    there = None if device is None else torch.device(device)
    if there is not None:
        given = tree_map(lambda t: t.to(there) if isinstance(t, Tensor) else t, given)
    store = None if checkpoint is None else resume.Blocks(checkpoint, model, given, asked)
    try:
        with (
            restoring([*model.modules(), *rotate.configs_of(model)]),
            undisturbed(model),
            blocks.without_cache(model),
            offload.streamed(model, there),
        ):
            found = links.find(model, given[0]) if asked.folds or asked.rotates else None
            if found is not None and asked.rotates:
                with links.unchanged(model, given[0], "a rotation"):
                    rotate.rotate(model, found, stream="r1" in asked.steps, heads="r2" in asked.steps)
            cached = caches.plan(model, named(asked.recipe), filter_fn, skip_incompatible=skip_incompatible)
            if cached.layers is None:
                raise ValueError("calibrate_ptq: the recipe is for KV caches alone: use aoquant.calibrate")
            layers, stacks, others = prepare_layers(
                model, cached.layers, filter_fn, step, skip_incompatible, chooses=asked.chooses
            )
            if asked.all_experts:
                refuse({n: ALL_EXPERTS for n, m in stacks.items() if isinstance(m, QATReadExperts)})
            gains, left = dict[str, float](), dict[str, str]()
            if asked.folds and not asked.chooses:
                left = {f"{n}.{p}": NOT_SCALED for n, m in stacks.items() for p in m.stacks}
                refuse({} if skip_incompatible else left)
            if found is not None and asked.folds:
                with links.unchanged(model, given[0], asked.method):
                    gains, unscaled = fold.fold(model, layers, found, given, asked, skip=skip_incompatible)
                left |= unscaled
            kv_caches = cached.prepare(model)
            if uncalibrated(model) or any(m.prepared.recipe.holds for m in layers.values() if gains):
                calibrate(model, given)
            for cache in kv_caches:
                cache.fake_quant = False
            rows = others
            if layers or stacks:
                rows = others + _Run(model, layers, stacks, given, asked, step, store, there, gains).rows()
            for cache in kv_caches:
                cache.fake_quant, cache.converted = True, step is None
    finally:
        fast_path.sync(model)
    if step == "prepare":
        replaced.record(model)
        direct_reads.watch(model, list(layers.values()))
    return PTQReport([_behind_fold(row, gains, left) for row in rows])


def _behind_fold(row: PTQRow, gains: Mapping[str, float], left: Mapping[str, str]) -> PTQRow:
    """Return a row whose `nearest` is that of the weight before its input channels were scaled."""
    nearest = row.nearest / max(gains.get(row.layer, 1.0), 1e-300)
    return dataclasses.replace(row, nearest=nearest, note="; ".join(filter(None, (row.note, left.get(row.layer)))))


def listed_batches(batches: Any) -> list[Any]:
    """Return the batches as a list.

    Raises:
        ValueError: there are none, one holds no tensor, or one batch was given in their place.
    """
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise ValueError(f"batches is a list of batches, got {type(batches).__name__}: give [batch]")
    given = list(batches)
    if not given:
        raise ValueError("there are no batches: give some, such as 128 sequences of 2048 tokens")
    for at, batch in enumerate(given):
        check_batch(batch, f"batch {at}")
    return given


@dataclass
class _Run:
    """Hold one calibration: what it needs, and the rows that it made so far.

    later: changes to torchao's tensors that cannot run here: aoquant's stand in for them. shown: progress. block: "1
    of 4".
    """

    model: nn.Module
    layers: dict[str, Any]
    stacks: dict[str, Any]
    batches: list[Any]
    config: CalibrateConfig
    step: str | None
    store: resume.Blocks | None
    device: torch.device | None
    gains: Mapping[str, float]
    done: resume.Found = field(default_factory=dict)
    later: list[Change] = field(default_factory=list)
    shown: Any = None
    block: str = ""

    def rows(self) -> list[PTQRow]:
        found = blocks.find(self.layers | self.stacks, self.model)
        body = blocks.below_head(self.model, found, self.batches)
        found = blocks.ordered(body, found, self.batches)
        reached = {fqn for block in found for fqn in block.layers}
        refuse({fqn: NOT_REACHED for fqn in self.layers | self.stacks if fqn not in reached})
        walk = blocks.walk(body, found, self.batches, twins=self.config.towards_float, device=self.device)
        total = sum(len(self._names(fqn)) for fqn in self.layers | self.stacks)
        with closing(walk), progress(total, self.config.method, "layer") as self.shown:
            for i, visit in enumerate(chain(walk, [None])):
                if i:
                    self._map(found[i - 1].fqn)  # it has left the device
                if visit is not None:
                    self.block = f"{i + 1} of {len(found)}"
                    self.shown.set_postfix(block=self.block)
                    self.shown.update(0)
                    self._visit(visit)
        for change in self.later:
            packed = change.weight
            with naming(change.fqn, experts.UNCHANGED):
                built = change.target.build(packed.encoded, packed)
            give_weight(change.module, nn.Parameter(built, requires_grad=False))
        made = [row for _, row in self.done.values()]
        for warning in (*_not_shown(made, self.layers), *missing_kernels(self.later, None)):
            warn(warning)
        return made

    def _names(self, fqn: str) -> list[str]:
        """Return the names that get codes: of a layer, or of a module's stacks."""
        return [f"{fqn}.{name}" for name in self.stacks[fqn].stacks] if fqn in self.stacks else [fqn]

    def _visit(self, visit: blocks.Visit) -> None:
        """Calibrate one block, group by group, or give it the codes that were found before."""
        if self.store is not None and (before := self.store.read(visit.block.fqn)) is not None:
            asked = {name for fqn in visit.block.layers for name in self._names(fqn)}
            if other := ", ".join(sorted(before.keys() ^ asked)):
                raise ValueError(
                    f"{visit.block.fqn}: the checkpoint has codes of other layers ({other}): give the same filter_fn, or an empty folder"
                )
            for fqn, (encoded, row) in before.items():
                self._place(fqn, encoded, row)
            for fqn in visit.block.layers if self.step == "prepare" else ():
                visit.block.layers[fqn].fake_quant = True
            return
        groups = blocks.groups(visit)
        reached = {fqn for group in groups for fqn in group}
        refuse({fqn: NOT_REACHED for fqn in visit.block.layers if fqn not in reached})
        earlier = set(self.done)
        for group in groups:
            for members in _alike({fqn: self.layers[fqn] for fqn in group if fqn in self.layers}):
                self._group(visit, members)
            for fqn in group:
                if fqn in self.stacks:
                    self._experts(visit, fqn)
        made = {fqn: found for fqn, found in self.done.items() if fqn not in earlier}
        if self.store is not None:
            self.store.write(visit.block.fqn, made)
        self.done |= {fqn: (None, row) for fqn, (_, row) in made.items()}  # codes are in the layers

    def _map(self, fqn: str) -> None:
        """Have the packed weights of a finished block read from its file: they take no memory of the process then."""
        for name, (encoded, _) in ((self.store and self.store.read(fqn, verify=False)) or {}).items():
            home, _, own = (name, "", "weight") if name in self.layers else name.rpartition(".")
            module = (self.layers | self.stacks)[home]
            weight = getattr(module, own)
            if encoded is None or not isinstance(weight, PackedTensor) or not weight.is_cpu:
                continue
            for part, t in {"qdata": encoded.codes, "scale": encoded.scale, "zero_point": encoded.zero}.items():
                made = getattr(weight, part)
                if t is not None and made is not None and (t.shape, t.dtype) == (made.shape, made.dtype):
                    setattr(weight, part, t)
            setattr(module, own, weight)  # a layer holds views of the parts

    def _experts(self, visit: blocks.Visit, fqn: str) -> None:
        module = self.stacks[fqn]
        names = experts.in_order(visit, module)
        refuse({f"{fqn}.{name}": NOT_REACHED for name in module.stacks if name not in names})
        for name in names:
            encoded, row = experts.choose(visit, fqn, module, name, self.config)
            self._place(row.layer, encoded, row)
        if self.step == "prepare":
            module.fake_quant = True

    def _group(self, visit: blocks.Visit, members: Sequence[str]) -> None:
        """Calibrate layers that multiply the same input."""
        first: QATLinear = self.layers[members[0]]
        operand = first.prepared.recipe.fprop_weight
        if operand.format.lossless or first.prepared.recipe.history:
            for fqn in members:
                note = "its weight is not rounded to codes here"
                self._place(fqn, None, PTQRow(fqn, operand.name, 0, 0.0, 0.0, 0.0, note))
            return
        chooses, clips = "gptq" in self.config.steps, "clip" in self.config.steps
        encoded, moved, notes = dict[str, Tensor](), dict[str, Tensor](), list[str]()
        for fqn in members:
            scales = self.layers[fqn].held_scales("weight")
            matrix = None if scales is None else scales.transform
            encoded[fqn] = operand.transformed(self.layers[fqn].matrix().detach(), matrix)
        rounded = {fqn: self.layers[fqn].encode_weight() for fqn in members}
        # A Gram matrix is as large as the inputs of a block: each is freed when what follows from it is there.
        with naming(members[0], experts.UNCHANGED):
            gram = self._gram(visit, members[0], first)
            tokens = gram.rows
            h_KK, ahead_KK = gram.mean()
        del gram
        if not h_KK.diagonal().any():
            if self.config.strict:
                raise ValueError(
                    f"{members[0]}: {ZERO}, and strict is set: give batches that use it, or leave it out. The model is unchanged"
                )
            for fqn in members:
                note = f"{ZERO}, and it is rounded to the nearest"
                self._place(fqn, None, PTQRow(fqn, operand.name, tokens, 0.0, 0.0, 0.0, note))
            return
        if chooses and ahead_KK is not None:
            moved = {fqn: gptq.ahead(w_NK, ahead_KK) for fqn, w_NK in encoded.items()}
        del ahead_KK
        codes, diagonal_K, order_K, damping, factor = dict(rounded), h_KK.diagonal(), None, 0.0, None
        if chooses:
            with naming(members[0], experts.UNCHANGED):
                factor = gptq.factor(h_KK, self.config.damping, self.config.act_order)
            x_as = first.prepared.recipe.fprop_input
            moved = {fqn: gptq.towards_float(encoded[fqn], of_NK, factor, x_as) for fqn, of_NK in moved.items()}
        for fqn in members if clips else ():
            w_NK, held = encoded[fqn], self.layers[fqn].held_scales("weight")
            with naming(fqn, f". Leave out clip{experts.UNCHANGED}"):
                codes[fqn] = clip.encode(operand.format, moved.get(fqn, w_NK).to(w_NK.dtype), held, h_KK)
        if factor is not None:
            diagonal_K, order_K, damping = factor.write_upper(h_KK), factor.order_K, factor.damping
            del factor
        few = tokens < len(h_KK) and (chooses or clips)
        if damping > self.config.damping:
            notes.append(f"needed damping {damping:g}")
        if few:
            notes.append(f"saw {tokens} tokens for K = {len(h_KK)}")
        for fqn in members:
            layer, e, target_NK = self.layers[fqn], codes[fqn], moved.pop(fqn, encoded[fqn].float())
            values_in = layer.weight.dtype if operand.transform is None else torch.float32
            nearest = gptq.missed(target_NK, h_KK, diagonal_K, gptq.decoded(operand.format, rounded[fqn], values_in))
            if order_K is not None:
                weight = gptq.Weight(target_NK, e, h_KK, diagonal_K, order_K)
                ((e, lost),) = gptq.choose_codes([weight], operand.format, values_in)
            else:
                lost = gptq.missed(target_NK, h_KK, diagonal_K, gptq.decoded(operand.format, e, values_in))
            row = PTQRow(fqn, operand.name, tokens, lost, nearest, damping, "; ".join(notes), int(few))
            self._place(fqn, None if e is rounded[fqn] else e, row)

    def _gram(self, visit: blocks.Visit, fqn: str, layer: QATLinear) -> InputGram:
        gram = InputGram(layer.matrix().shape[1], layer.weight.device, cross=visit.twin is not None)
        inside = fqn[len(visit.block.fqn) :].lstrip(".")
        for i, given in enumerate(visit.calls):
            call, float_call = blocks.call_of(visit.block.module, layer, given), None
            if visit.twin is not None:
                float_call = blocks.call_of(visit.twin, visit.twin.get_submodule(inside), visit.float_calls[i])
            gram.add(
                None if call is None else multiplied(layer, call.input, call.mask),
                None if float_call is None else multiplied(layer, float_call.input, float_call.mask, rounded=False),
            )
        return gram

    def _place(self, fqn: str, encoded: Encoded | None, row: PTQRow) -> None:
        """Give a layer its codes: from now on it computes what it will compute when it is deployed."""
        self.done[fqn] = encoded, row
        nearest = row.nearest / max(self.gains.get(fqn, 1.0), 1e-300)
        error = f"{row.error / nearest:.2f} of rounding's" if nearest else "0"
        self.shown.set_postfix(block=self.block, layer=fqn, error=error)
        self.shown.update(1)
        if fqn not in self.layers:
            home, _, name = fqn.rpartition(".")
            experts.place(home, self.stacks[home], name, encoded, packs=self.step is None)
            return
        layer = self.layers[fqn]
        if encoded is not None:
            where = layer.weight.device
            encoded = Encoded.of((None if t is None else t.to(where) for t in encoded.tensors), encoded.k)
        if self.step is None:
            change = plan_layer(layer, QATConfig(step="convert"), fqn)
            assert change is not None
            if why_not_run(change.target, layer.weight.device, change.dtype, *change.matrix().shape) is not None:
                self.later.append(change)
                change = dataclasses.replace(change, target=packed_target(layer.prepared.recipe.deployed))
            apply(change if encoded is None else dataclasses.replace(change, codes=[encoded]))
            return
        layer.fake_quant = True
        if encoded is None:
            return
        packed = PackedTensor.from_encoded(encoded, layer.prepared.recipe.deployed, layer.weight.dtype)
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
        if not with_codes(layer, packed):
            raise experts.no_weight(fqn, layer.prepared.recipe, layer.weight.dtype)


def _not_shown(rows: Sequence[PTQRow], layers: Mapping[str, Any]) -> list[str]:
    """Return warnings of layers and experts that saw few tokens or zeros, also before a calibration went on."""
    found = []
    if zero := [row for row in rows if row.note.startswith(ZERO)]:
        found.append(f"{len(zero)} layer(s), such as {zero[0].layer}: {zero[0].note}: give batches that use it")
    if few := [row for row in rows if row.few and row.layer in layers]:
        found.append(f"{len(few)} layer(s), such as {few[0].layer}, {few[0].note}: give at least K tokens, better 16 K")
    if few := [row for row in rows if row.few and row.layer not in layers]:
        found.append(
            f"{sum(row.few for row in few)} experts of {len(few)} stack(s), such as {few[0].layer}, saw too few tokens and are rounded "
            "to the nearest; the report counts them: give more batches, or all_experts=True"
        )
    return found


def _alike(layers: dict[str, QATLinear]) -> list[list[str]]:
    """Return names of layers that multiply their weights by the same numbers, and are rounded alike."""
    found: dict[Any, list[str]] = {}
    for fqn, layer in layers.items():
        recipe = layer.prepared.recipe
        own: Any = fqn if recipe.fitted or recipe.input_scales != "dynamic" else None
        found.setdefault((recipe.fprop_input, recipe.fprop_weight.name, own), []).append(fqn)
    return list(found.values())
