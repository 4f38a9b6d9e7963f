"""Private names of torch, torchao and transformers in the source: each stands here with its reason, and is there.

No public way does the same in torch 2.11 to 2.13, or it costs too much where it runs in every call. A name that another
version lacks fails here by itself, with the files that use it. A new private name has to be written down first.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao
import transformers
from torch import nn

import aoquant

ROOT = Path(aoquant.__file__).parent
# (what has the names, the names, why they are used); "a or b": what two versions call one thing
USES = [
    ("torch", "_scaled_mm", "the operator that torchao's Float8Tensor calls; F.scaled_mm is another one"),
    ("torch", "_int_mm", "the operator that torchao's Int8Tensor calls; the integer GEMM has no public name"),
    ("torch", "_grouped_mm", "models call it by this name, and packed experts answer it"),
    (
        "torch.ops.aten",
        "_weight_int4pack_mm _convert_weight_to_int4pack",
        "tinygemm and its packer have no public names",
    ),
    ("torch.ops.aten", "_weight_int4pack_mm_for_cpu _convert_weight_to_int4pack_for_cpu", "the same for a CPU"),
    ("torch.ops.aten", "_unsafe_view", "the only alias that autograd takes for no view, so that relu_ may write to it"),
    ("torch", "_C", "holds the names below"),
    (
        "torch._C",
        "_are_functorch_transforms_active _is_any_autocast_enabled _is_torch_function_mode_enabled _len_torch_dispatch_stack",
        "whether a call is ordinary, asked in every call: public ways ask for one device or mode, or there is none",
    ),
    (
        "threading",
        "_DummyThread",
        "how Python tells a thread that it did not begin, as autograd's are; the name is documented",
    ),
    ("torch.autograd.forward_ad", "_current_level", "the same for forward-mode derivatives"),
    ("torch._dynamo", "compiled_autograd", "it is to trace a backward, and has no public way to ask whether it will"),
    (
        "torch._C",
        "DisableTorchFunctionSubclass",
        "what torch.overrides does not offer: a call without __torch_function__",
    ),
    ("torch._C", "_disabled_torch_function_impl", "how a tensor subclass says that it has no __torch_function__"),
    (
        "torch._C",
        "_cuda_getCurrentRawStream",
        "a key for the stream; torch.cuda.current_stream makes an object in each call",
    ),
    (
        "torch._C",
        "_cuda_getDevice",
        "torch.cuda.current_device also looks whether CUDA is initialised, in every launch",
    ),
    ("torch.Tensor", "_make_subclass _make_wrapper_subclass", "the only constructors of tensor subclasses from Python"),
    ("torch.Tensor", "_version _base _is_view", "whether memory was written since; nothing public counts that"),
    (
        "torch.UntypedStorage",
        "_cdata",
        "which storage, without keeping it alive; data_ptr is used again",
    ),
    ("torch.autograd", "_unsafe_preserve_version_counter", "FSDP2 writes gathered weights so: the write is no change"),
    (
        "torch.nn.Linear(1, 1)",
        "_parameters _buffers _modules _non_persistent_buffers_set",
        "where register_parameter puts things; getattr of a missing name is slow, and of a parametrised one computes it",
    ),
    (
        "torch.nn.Linear(1, 1)",
        "_apply _load_from_state_dict",
        "where a module mends .to() and load_state_dict of its own",
    ),
    (
        "torch.nn.Linear(1, 1)",
        "_forward_hooks _forward_hooks_always_called _forward_pre_hooks",
        "a hook is taken away in a copy of the model, whose handle is the original's",
    ),
    ("torch.nn.Linear(1, 1)", "_compiled_call_impl", "whether module.compile() was called"),
    (
        "torch._dynamo.OptimizedModule",
        "_orig_mod",
        "the module that torch.compile wrapped",
    ),
    ("torch", "_dynamo", "holds the names below"),
    ("torch._dynamo", "mark_static mark_static_address", "torch.compiler has no names for them"),
    (
        "torch._dynamo.decorators",
        "skip",
        "torch.compiler.disable wraps what it hides, which takes as long as the call's own Python",
    ),
    ("torch._C._dynamo.eval_frame", "get_eval_frame_callback", "whether Dynamo watches, asked in every call of an op"),
    ("torch", "_ops", "holds the name below"),
    ("torch._ops", "OpOverload", "the class of operators"),
    ("torch.ops.aten.mul_.Tensor", "_schema", "whether an operator writes"),
    ("torch._inductor", "config", "where a pass of Inductor is installed"),
    (
        "torch._inductor.custom_graph_pass",
        "CustomGraphPass get_hash_for_files",
        "the class that such a pass has to have",
    ),
    ("torch._guards", "TracingContext", "whether AOTAutograd traces; is_compiling() is False there"),
    ("torch.overrides", "_get_current_function_mode_stack", "the watch of the forward that runs in this thread"),
    (
        "torch.utils._pytree",
        "tree_leaves tree_map tree_map_only",
        "the tensors in the arguments of a function, however they are nested",
    ),
    ("torch._subclasses.fake_tensor", "FakeTensorMode", "what a run keeps and multiplies, of a model without values"),
    ("torch._subclasses", "FakeTensor", "whether a function that Dynamo takes as one call is traced"),
    (
        "torch.utils._python_dispatch",
        "is_traceable_wrapper_subclass return_and_correct_aliasing",
        "what every tensor subclass of torchao's builds on",
    ),
    ("torch.utils._python_dispatch", "TorchDispatchMode", "the operators that a function runs, to repeat them"),
    (
        "torch.distributed.tensor._utils",
        "compute_local_shape_and_global_offset",
        "which rows a rank holds of a DTensor that is not made yet",
    ),
    ("torch.distributed.tensor.DTensor", "_local_tensor", "how FSDP2 is given a shard that encodes itself"),
    ("torch.distributed._composable_state", "_module_state_mapping", "FSDP2 has no way from a layer to its mesh"),
    ("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", "FSDP2 has no way to take a parameter back"),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
        "_fsdp_param_groups or _fsdp_param_group",
        "FSDP2 has no way to take a parameter back",
    ),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
        "_module_info _post_load_hook_handle _init_extensions",
        "FSDP2 has no way to take a parameter back, or to look for extensions once more",
    ),
    (
        "torch.nn.parallel.DistributedDataParallel",
        "_active_ddp_module",
        "whose forward runs, for the rank of its layers",
    ),
    (
        "aoquant.PackedTensor",
        "_ATEN_OP_TABLE",
        "what `implements` fills: a missing operator raises our message",
    ),
    ("torchao.quantization.transform_module", "_QUANTIZE_CONFIG_HANDLER", "torchao's own handlers, which ours call"),
    (
        "torchao.quantization.Int8Tensor",
        "_normalize_granularity",
        "the two sides of Int8's granularity, as torchao reads it",
    ),
    (
        "transformers.PreTrainedModel",
        "_from_config _get_dtype_plan _keys_to_ignore_on_load_unexpected _keys_to_ignore_on_save _no_split_modules _init_weights",
        "how from_pretrained and save_pretrained treat a model's tensors",
    ),
]
# read with a default or a fallback where it is missing: what it tells is of other libraries, or nothing is lost
OPTIONAL = {
    "_apply_gate": "of transformers' experts, whose protocol is probed (experts/families.py)",
    "_data": "of os.environ: with another Python it is asked the slow way",
    "_experts_implementation": "of a transformers config",
    "_fsdp_flattened": "of FSDP1's parameters",
    "_fsdp_use_orig_params": "of FSDP1's modules",
    "_getframe": "of sys, documented",
    "_hf_hook": "of accelerate",
    "_is_fsdp_managed_module": "of FSDP's modules",
    "_is_param": "of a tensor subclass that is a parameter",
    "_old_forward": "of accelerate",
    "_prepare_weights": "of vLLM's loader (test/engines)",
    "_replace": "of a NamedTuple, documented",
    "_asdict": "of a NamedTuple, documented",
    "_fields": "of a NamedTuple, documented",
}


@cache
def used() -> dict[str, list[str]]:
    """Every private name that the source reads or overrides and does not define itself, with its places."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    own = {n.name for _, n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.attr for _, n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {n.id for _, n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own -= {name for _, names, _ in USES for name in names.split()}
    found: dict[str, list[str]] = {}
    for path, node in nodes:
        for name in _names(node):
            if name not in own:
                found.setdefault(name, []).append(f"{path.relative_to(ROOT.parent)}:{node.lineno}")
    return found


def _names(node: Any) -> list[str]:
    """The private names of others in one node of a syntax tree; of a private module, what is imported from it."""
    if isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("aoquant"):
        inside = any(part.startswith("_") for part in (node.module or "").split(".")[1:])
        return [a.name for a in node.names if inside or _is_private(a.name)]
    name = None
    if isinstance(node, ast.Attribute) and re.fullmatch(r"torch\._\w+", ast.unparse(node.value)):
        return [node.attr]
    if isinstance(node, ast.Attribute):
        name = node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
    elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and "vars(" in ast.unparse(node):
        name = node.left.value
    return [name] if isinstance(name, str) and _is_private(name) else []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _has(thing: Any, name: str) -> bool:
    """Whether an object has a name, or a class sets it on its objects."""
    return hasattr(thing, name) or (inspect.isclass(thing) and f"self.{name}" in inspect.getsource(thing))


def _found(expression: str) -> Any:
    """What an expression of USES names; its modules are imported."""
    if "(" in expression:
        return eval(expression, {"torch": torch})
    try:
        return pkgutil.resolve_name(expression)
    except ImportError:
        return None


@pytest.mark.parametrize(
    ("owner", "name", "why"), [(o, n, why) for o, names, why in USES for n in names.replace(" or ", "|").split()]
)
def test_a_private_name_is_there(owner: str, name: str, why: str) -> None:
    if name.startswith("_cuda") and torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    thing = _found(owner)
    places = ", ".join(place for one in name.split("|") for place in used().get(one, ()))
    assert thing is not None and any(_has(thing, one) for one in name.split("|")), (
        f"{owner} has no {name} in torch {torch.__version__}, torchao {torchao.__version__}, transformers "
        f"{transformers.__version__}, and {places} need it ({why}): find what has replaced it"
    )


def test_every_private_name_has_its_reason() -> None:
    named = {one for _, names, _ in USES for one in names.replace(" or ", " ").split()}
    new = {name: places for name, places in used().items() if name not in named and name not in OPTIONAL}
    assert not new, f"private names of other libraries: use what is public, or say in {Path(__file__).name} why not"
    left = sorted((named | set(OPTIONAL)) - set(used()))
    assert not left, "names that the source does not use any more"


def test_a_name_that_vanished_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _has(nn.Linear(1, 1), "_buffers") and not _has(nn.Linear(1, 1), "_vanished")
    monkeypatch.delattr(torch, "_int_mm")
    with pytest.raises(
        AssertionError, match=r"torch has no _int_mm in torch .*ops/gemm/cpu.py.* need it \(the operator"
    ):
        test_a_private_name_is_there("torch", "_int_mm", "the operator")
