"""A model on the meta device that takes its tensors from a folder one by one, packed ones as they are.

Readers of other libraries' folders put quantised weights in first, and let the rest follow. Names in files differ from
the model's where transformers renames tensors or stacks experts; a folder with the model's own names is read as well.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from aoquant._messages import bar, some
from aoquant.experts.families import experts_of, stacks_of
from aoquant.files import checkpoint, checksums
from aoquant.files.safetensors_file import StoredTensor, header, read_json
from aoquant.files.stored_names import Piece, keep_wide, model_names, pieces_of
from aoquant.formats import FLOAT_DTYPES


class Filling:
    """A model in the making. method: the layout that config.json names. dtype: of what stays float and of layers'
    outputs; "auto" is config.json's. device_map: one device; None: the CPU.

    stored: tensors of the folder that have no place yet, by name in the model, those of
    experts' matrices by name in files. names: in files, by name in the model. stacks: stacked parameters of experts,
    each with the pieces that files keep it in, none where they keep it whole.

    Raises:
        ValueError: files that do not fit the model, or another device_map.
    """

    def __init__(
        self, folder: Path, model_class: Any, method: str, *, dtype: torch.dtype | str = "auto", device_map: Any = None
    ) -> None:
        from accelerate import init_empty_weights

        if isinstance(device_map, Mapping) or device_map in ("auto", "balanced", "sequential"):
            raise ValueError(
                f"{folder}: a {method} checkpoint is loaded onto one device, got device_map={device_map!r}"
            )
        files = checkpoint.files(folder)
        checksums.verify_unless_told(files, configs=True)
        own = getattr(model_class, "config_class", None)  # a class reads configs that name a relative of its own
        config = (AutoConfig if own is None else own).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if own is not None:
            config.model_type = own.model_type  # by which transformers knows the names in files
        self.quantization: dict[str, Any] = read_json(folder / "config.json")["quantization_config"]
        del config.quantization_config
        dtype = config.dtype if dtype == "auto" else dtype
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.bfloat16
        with init_empty_weights(include_buffers=False):
            make = getattr(model_class, "from_config", None) or model_class._from_config
            self.model: PreTrainedModel = make(config, dtype=self.dtype).eval()
            computed = dict(make(config, dtype=torch.float32).named_buffers())
        stored_too = self.model.state_dict()
        for name, buffer in self.model.named_buffers():
            if name not in stored_too:  # computed in float32, as `from_pretrained` does
                buffer.copy_(computed[name])
        keep_wide(self.model, self.dtype)
        self.folder, self.device = folder, device_map
        stored: dict[str, StoredTensor] = {}
        for path in files:
            stored |= header(path).tensors
        places = model_names(self.model, stored)
        self.names = {name: own for own, name in places.items()}
        self.stored = {places[own]: tensor for own, tensor in stored.items()}
        self.stacks: dict[str, list[Piece]] = {
            f"{name}.{stack}": pieces_of(self.model, f"{name}.{stack}")
            for name, module in experts_of(self.model).items()
            for stack in stacks_of(module)
        }

    def take(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors, by their names in `stored`."""
        return {name: self.stored.pop(name).read() for name in names}

    def put(self, name: str, packed: Tensor) -> None:
        """Give the model a packed parameter. Raises ValueError: the model wants another shape."""
        wanted = self.model.get_parameter(name).shape
        if packed.shape != wanted:
            raise ValueError(f"{self.folder}: {name} is {tuple(packed.shape)}, and the model wants {tuple(wanted)}")
        self._set(name, packed, requires_grad=False)

    def finish(self) -> PreTrainedModel:
        """The model with everything else that the folder holds.

        Raises:
            ValueError: a tensor has no place in the model, or the model has parameters that the folder lacks.
        """
        for name, pieces in self.stacks.items():
            if pieces and all(p.name in self.stored for p in pieces):
                self._stack(name, pieces)
        named = (*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers())
        places = {name: tensor for name, tensor in named if not self.stacks.get(name)}
        with bar(sum(stored.size for stored in self.stored.values()), "load") as shown:
            for name in sorted(self.stored):
                stored = self.stored[name]
                tensor = places.get(name)
                if tensor is None or tensor.shape != stored.shape:
                    raise ValueError(
                        f"{self.folder}: {self.names[name]} {stored.shape} has no place in {type(self.model).__name__}: load it with transformers"
                    )
                floats = {stored.dtype, tensor.dtype} <= {*FLOAT_DTYPES}
                values = stored.read()
                self._set(name, values.to(tensor.dtype) if floats else values, tensor.requires_grad)
                shown.set_postfix(tensor=name)
                shown.update(stored.size)
        model = self.model
        model.tie_weights()
        self._compute()
        if left := [n for n, p in model.named_parameters() if p.is_meta]:
            raise ValueError(
                f"{self.folder}: does not hold {some(left)} of {type(model).__name__}: load it with transformers"
            )
        if (self.folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return model if self.device is None else model.to(self.device)

    @torch.no_grad()
    def _compute(self) -> None:
        """Make the parameters that transformers computes and does not save, such as Marian's positions."""
        for name in self.model._keys_to_ignore_on_save or ():
            p = dict(self.model.named_parameters()).get(name)
            if p is not None and p.is_meta:
                self._set(name, torch.empty(p.shape, dtype=p.dtype, device="cpu"), p.requires_grad)
                self.model._init_weights(self.model.get_submodule(name.rpartition(".")[0]))

    def _stack(self, name: str, pieces: list[Piece]) -> None:
        tensor = self.model.get_parameter(name)
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for piece in pieces:
            values[piece.expert, piece.start : piece.end] = self.take([piece.name])[piece.name]
        self._set(name, values, tensor.requires_grad)

    def _set(self, name: str, values: Tensor, requires_grad: bool) -> None:
        owner, _, own = name.rpartition(".")
        module = self.model.get_submodule(owner)
        parameter = own in module._parameters
        setattr(module, own, nn.Parameter(values, requires_grad=requires_grad) if parameter else values)
