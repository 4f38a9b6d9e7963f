"""A callback for transformers' Trainer: when fake quantisation starts, and how far the weights are from their codes.

    quantize_(model, QATConfig(base, step="prepare"))
    trainer = Trainer(model, ...)
    QATCallback(fake_quant_after_n_steps=100).attach(trainer)

A prepared model needs no callback to train. The switch is a function of `state.global_step` alone, so a run that is
resumed from a checkpoint is where it was. The SQNR of the weights drops when outliers grow, and costs one encode and
decode of each weight.
"""

import functools
import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback  # not Trainer: its import calls `install` of this module

from aoquant._messages import warn
from aoquant.experts.families import experts_of
from aoquant.experts.prepared import QATExperts
from aoquant.linear.learned_scales import learned_scales, not_positive
from aoquant.linear.prepared import PreparedModule, QATLayer
from aoquant.linear.switches import set_fake_quant
from aoquant.report.measure import having, logits_of, run, sqnr, undisturbed
from aoquant.report.routing import changed_share, drift, routes

if TYPE_CHECKING:
    from transformers import Trainer

MIN, MEAN, OUTPUT = "qat/weight_sqnr_min_db", "qat/weight_sqnr_mean_db", "qat/output_sqnr_db"
DRIFT = "qat/router_changed_share"
# optimizers that treat what has two dimensions as a matrix
_MATRICES = re.compile("muon|dion|shampoo|soap|galore", re.IGNORECASE)


class QATCallback(TrainerCallback):
    """Start fake quantisation after N optimizer steps and log SQNR.

    fake_quant_after_n_steps: N; 0 is from the start.
    log_every: log SQNR, and with it the loss, every so many steps; None adds it whenever the Trainer logs the loss.
    batch: the model's input for the output's SQNR: a tensor, positional or keyword arguments.
    router_drift: log the share of the batch's tokens that change experts, float against fake-quantised.

    Raises:
        ValueError: a number that is out of range, or router_drift without a batch; and when training begins, a model
            without prepared layers, or router_drift of one without stacked experts.
    """

    def __init__(
        self,
        fake_quant_after_n_steps: int = 0,
        log_every: int | None = None,
        batch: Any = None,
        *,
        router_drift: bool = False,
    ) -> None:
        if fake_quant_after_n_steps < 0:
            raise ValueError(f"fake_quant_after_n_steps must be 0 or more, got {fake_quant_after_n_steps}")
        if log_every is not None and log_every < 1:
            raise ValueError(f"log_every must be 1 or more, or None, got {log_every}")
        if router_drift and batch is None:
            raise ValueError("router_drift needs a batch, whose tokens are followed: give batch=")
        self.after, self.log_every, self.batch = fake_quant_after_n_steps, log_every, batch
        self.router_drift = router_drift

    def attach(self, trainer: "Trainer") -> "QATCallback":
        """Add to a Trainer in front of its other callbacks.

        Trainer(callbacks=[...]) puts callbacks last: SQNR is then in `state.log_history`, but wandb and TensorBoard
        have written their line by the time it is known.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        self._switch(model, state)
        if self.router_drift and not experts_of(model):
            raise ValueError(f"router_drift: {type(model).__name__} has no stacked experts: leave it out")
        if self.after >= state.max_steps:
            warn(
                f"training ends at step {state.max_steps}, so no step is fake-quantised: fake_quant_after_n_steps is "
                f"{self.after}"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> Any:
        if state.global_step == self.after:
            self._switch(model, state)
        if self.log_every is not None and state.global_step % self.log_every == 0:
            control.should_log = True
        return control

    def on_log(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        if "loss" not in logs or state.global_step % (self.log_every or 1):
            return  # logs of an evaluation, of the end of training, or of a step that `log_every` leaves out
        found = self._measure(model)
        logs.update(found)
        state.log_history[-1].update(found)  # the Trainer has copied logs into it already

    def _switch(self, model: nn.Module, state: Any) -> None:
        set_fake_quant(model, state.global_step >= self.after)

    @torch.no_grad()
    def _measure(self, model: nn.Module) -> dict[str, float]:
        layers = {id(m.weight): m for m in model.modules() if isinstance(m, QATLayer)}.values()
        found = [sqnr(m.matrix() if m.master is None else m.master, m.quantised_weight()) for m in layers]
        experts = [(m, name) for m in model.modules() if isinstance(m, QATExperts) for name in m.stacks]
        found += [sqnr(m.values(name), m.quantised_weight(name)) for m, name in experts]
        logs = {MIN: min(found), MEAN: sum(found) / len(found)}
        if self.batch is not None:
            logs |= self._on_batch(model)
        return logs

    def _on_batch(self, model: nn.Module) -> dict[str, float]:
        """The fake-quantised model against the same model in high precision: SQNR of outputs, and router drift."""
        prepared = [m for m in model.modules() if isinstance(m, PreparedModule)]
        outputs, chosen = [], []
        with undisturbed(model), having(prepared, "fake_quant", True):
            for enabled in (False, True):
                set_fake_quant(model, enabled)
                outputs.append(logits_of(run(model, self.batch)))
                chosen += [routes(model, self.batch)] if self.router_drift else []
        return {OUTPUT: sqnr(*outputs), **({DRIFT: changed_share(drift(*chosen))} if chosen else {})}


class ScaleCallback(TrainerCallback):
    """Warn of optimizers and of values that learned scales cannot have. Each warning comes once.

    Importing aoquant gives every Trainer this callback.
    """

    def __init__(self) -> None:
        self.said: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        if problem := misplaced(model, kwargs.get("optimizer")):
            warn(problem)

    def on_log(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        self._check(model, "log")

    def on_save(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        self._check(model, "save")

    def _check(self, model: nn.Module, when: str) -> None:
        if when not in self.said and (problem := not_positive(model)):
            self.said.add(when)
            warn(problem)


def misplaced(model: nn.Module, optimizer: Any) -> str | None:
    """Return a sentence about an optimizer that decays learned scales or takes them for matrices; None without one."""
    names = {id(p): name for name, p in learned_scales(model).items()}
    kinds = type(optimizer).__name__, type(getattr(optimizer, "optimizer", None)).__name__
    by_class = any(_MATRICES.search(kind) for kind in kinds)
    for group in getattr(optimizer, "param_groups", ()):
        found = [names[id(p)] for p in group["params"] if id(p) in names]
        matrices = group.get("use_muon", by_class)
        if found and (matrices or group.get("weight_decay")):
            does = f"takes {len(found)} learned scale(s)" if matrices else f"decays {len(found)} learned scale(s)"
            return (
                f"the optimizer {kinds[0]} {does}, such as {found[0]}, {'for matrices' if matrices else 'towards zero'}, which makes them too "
                "small or negative: give it aoquant.parameter_groups(model)"
            )
    return None


def install(module: ModuleType) -> None:
    """Take learned scales out of the decayed parameters of `transformers.trainer`, and watch them in each Trainer.

    Trainer decays every parameter but biases and norms, which it knows by their names.
    """
    module.DEFAULT_CALLBACKS.append(ScaleCallback)
    before = module.Trainer.get_decay_parameter_names

    @functools.wraps(before)
    def get_decay_parameter_names(self: Any, model: nn.Module) -> list[str]:
        scales = learned_scales(model)
        return [name for name in before(self, model) if name not in scales]

    module.Trainer.get_decay_parameter_names = get_decay_parameter_names
