"""Write a recorded program in the words that `csrc/step/program.h` reads, which then runs it without Python.

    step       MAKE result dtype [sizes] [strides]               an empty tensor of the arguments' device
               VIEW result slot dtype offset [sizes] [strides]   of a tensor's memory, in elements of as many bytes
               OPERATOR name overload [results] arguments        arguments: their count, then kind [words] of each
               LAUNCH address grid threads shared parameters     parameters: their count, then each
               DROP [slots]
    parameter  BITS bits                                         a number
               ADDRESS slot
               BOXES slot type swizzle [sizes] [strides] [box]   a map by which the copy engine reads a tensor in boxes
    [values]   their count, then they

A function here returns the words of one step, or None where the library has none for it: then the program stays in
Python. `Slot` and `Name` are words that `native_program` replaces by numbers: arguments that are not None come first
among slots, and names are a table of their own.
"""

import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import native_step

MAKE, VIEW, OPERATOR, LAUNCH, DROP = range(5)
NONE, TENSOR, TENSORS, INTEGER, NUMBER, BOOLEAN, INTEGERS, DEVICE = range(8)
BITS, ADDRESS, BOXES = range(3)
_KINDS = {
    "Tensor": TENSOR, "List[Tensor]": TENSORS, "int": INTEGER, "SymInt": INTEGER, "float": NUMBER, "bool": BOOLEAN,
    "ScalarType": INTEGER, "List[int]": INTEGERS, "List[SymInt]": INTEGERS, "MemoryFormat": INTEGER, "Layout": INTEGER,
    "Device": DEVICE,
}  # fmt: skip
_OF_A_NUMBER = {int: INTEGER, float: NUMBER, bool: BOOLEAN}
# numbers of c10::ScalarType
_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23, torch.float8_e4m3fn: 24,
    torch.float8_e8m0fnu: 44,
}  # fmt: skip
# what else is told by a number: of c10::MemoryFormat, c10::Layout and c10::DeviceType
_NUMBERS: dict[Any, int] = {**_TYPES, torch.contiguous_format: 0, torch.preserve_format: 1, torch.strided: 0}
_DEVICES = {"cpu": 0, "cuda": 1}
# what Triton says of a map; its numbers of types are the device's, of which the driver has three elsewhere
_MAPS = {"swizzle", "elem_size", "elem_type", "block_size", "fp4_padded"}
_OF_THE_DRIVER = {8: 10, 9: 8, 10: 9}


class Slot(int):
    """Mark a word as a tensor's slot."""


class Name(str):
    """Mark a word as a part of an operator's name."""


Words = list[Any]


class Boxes(NamedTuple):
    """Say how the copy engine reads a tensor in boxes; the innermost dimension comes first.

    type, swizzle: numbers of CUtensorMapDataType and CUtensorMapSwizzle. strides: in bytes, of all dimensions but the
        first.
    """

    type: int
    swizzle: int
    sizes: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]


Parameter = int | Boxes | None


class Kernel(NamedTuple):
    """Hold what launches a kernel. parameters: a number's bits, None for the next tensor's address, or `Boxes` of the
    next tensor.
    """

    address: int
    grid: Sequence[int]
    threads: int
    shared: int
    parameters: Sequence[Parameter]


def described(meta: dict[str, Any], shape: Sequence[int], strides: Sequence[int], padding: str) -> list[Parameter]:
    """Return the parameters that Triton's launcher makes of a tensor's descriptor.

    meta: of the compiled kernel.

    Raises:
        ValueError: it makes others than those of Triton 3.6, or the map has more to it.
    """
    if meta.keys() != _MAPS or meta["fp4_padded"] or padding != "zero":
        raise ValueError(f"an unknown map: {meta}, {padding}")
    element = meta["elem_type"]
    inner = [stride * meta["elem_size"] for stride in strides[-2::-1]]
    boxes = Boxes(_OF_THE_DRIVER.get(element, element), meta["swizzle"], shape[::-1], inner, meta["block_size"][::-1])
    return [boxes, *shape, *strides]


def make(t: Tensor, device: torch.device, result: int) -> Words | None:
    """Return the words that make an empty tensor like `t` in a program of `device`."""
    if t.dtype not in _TYPES or t.layout is not torch.strided or t.device != device:
        return None
    return [MAKE, Slot(result), _TYPES[t.dtype], *_list(t.shape), *_list(t.stride())]


def view(t: Tensor, of: Tensor, slot: int, result: int) -> Words | None:
    """Return the words that make the view `t` of `of`."""
    offset = t.storage_offset() - of.storage_offset()
    alike = t.layout is of.layout is torch.strided and t.itemsize == of.itemsize and t.is_neg() is of.is_neg()
    if offset < 0 or t.dtype not in _TYPES or not alike:
        return None
    return [VIEW, Slot(result), Slot(slot), _TYPES[t.dtype], offset, *_list(t.shape), *_list(t.stride())]


def named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by their names, and a constant for each number that stands for a tensor."""
    arguments = func._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    tensors = [t for t in given.values() if isinstance(t, Tensor)]
    kinds = {a.name: str(a.real_type) for a in arguments}
    return {name: _constant(v, tensors) if kinds[name] == "Tensor" else v for name, v in given.items()}


def operator(func: Any, given: dict[str, Any], slot: Callable[[Tensor], int], results: Sequence[int]) -> Words | None:
    """Return the words that call an operator. given: `named`. slot: of a tensor. results: slots, one for each."""
    schema = func._schema
    name, overload = Name(schema.name), Name(schema.overload_name)
    written: Words = [OPERATOR, name, overload, *_list([Slot(s) for s in results]), len(schema.arguments)]
    if {str(r.real_type) for r in schema.returns} not in ({"Tensor"}, {"List[Tensor]"}, set()):
        return None
    for a in schema.arguments:
        kind = str(a.real_type)
        if kind.startswith("Optional["):
            kind = kind.removeprefix("Optional[").removesuffix("]")
        value = given.get(a.name, a.default_value)
        words = _value(_OF_A_NUMBER.get(type(value)) if kind == "number" else _KINDS.get(kind), value, slot)
        if words is None:
            return None
        written += words
    return written


def launch(kernel: Kernel, slots: Iterable[int]) -> Words:
    """Return the words that launch a kernel on tensors of these slots."""
    words: Words = [LAUNCH, kernel.address, *kernel.grid, kernel.threads, kernel.shared, len(kernel.parameters)]
    tensors = iter(slots)
    for p in kernel.parameters:
        if isinstance(p, Boxes):
            words += BOXES, Slot(next(tensors)), p.type, p.swizzle, *_list(p.sizes), *_list(p.strides), *_list(p.box)
        else:
            words += (ADDRESS, Slot(next(tensors))) if p is None else (BITS, p)
    return words


def drop(slots: Iterable[int]) -> Words:
    """Return the words that empty slots."""
    return [DROP, *_list([Slot(s) for s in slots])]


def bits(value: float, kind: str = "f") -> int:
    """Return the bits of a number's float32, or of its float64 (kind "d")."""
    return int.from_bytes(struct.pack(f"<{kind}", value), "little", signed=True)


def native_program(
    steps: Sequence[Words | None],
    constants: dict[int, Tensor],
    arguments: Sequence[int],
    results: Sequence[int],
    slots: int,
) -> int | None:
    """Return the program's number in the step library; None where a step has no words, or there is no library.

    constants: tensors that it holds, by slot. arguments, results: the slots of these. slots: their count.
    """
    if None in steps or native_step.why_not() is not None:
        return None
    others = (slot for slot in range(slots) if slot not in arguments)
    order = {slot: i for i, slot in enumerate((*arguments, *others))}
    names: dict[str, int] = {}

    def number(word: Any) -> int:
        if isinstance(word, Name):
            return names.setdefault(word, len(names))
        return order[word] if isinstance(word, Slot) else int(word)

    written: Words = [slots, *_list([Slot(s) for s in constants]), len(steps)]
    for step in steps:
        written += step or ()
    words = [number(word) for word in (*written, *_list([Slot(s) for s in results]))]
    try:
        made: int = native_step.operator("program_make")(
            words, "\n".join(names), len(arguments), list(constants.values())
        )
    except RuntimeError as error:  # Python runs it
        logging.getLogger("aoquant.program").debug("no words for csrc's library: %s", error)
        return None
    return made


def _list(values: Sequence[int]) -> Words:
    return [len(values), *values]


def _value(kind: int | None, value: Any, slot: Callable[[Tensor], int]) -> Words | None:
    """Return [kind, *list of words] of an argument."""
    if value is None:
        return [NONE, 0]
    if kind == TENSOR:
        return [kind, 1, Slot(slot(value))] if isinstance(value, Tensor) else None
    if kind == TENSORS:
        return [kind, *_list([Slot(slot(t)) for t in value])]
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return [INTEGER, 1, _NUMBERS[value]] if value in _NUMBERS else None
    if kind == DEVICE:
        known = value.type in _DEVICES and (value.type == "cpu" or value.index is not None)
        return [DEVICE, 2, _DEVICES[value.type], -1 if value.type == "cpu" else value.index] if known else None
    if kind == NUMBER:
        return [kind, 1, bits(value, "d")]
    if kind == INTEGERS:
        return [kind, *_list(value)]
    return None if kind is None else [kind, 1, int(value)]


def _constant(value: Any, others: Sequence[Tensor]) -> Any:
    """Return a tensor for a number that stands for one, if types are promoted alike: a number's counts less."""
    if type(value) not in (int, float) or not others:
        return value
    made = torch.tensor(value, dtype=torch.int64 if type(value) is int else torch.float64, device="cpu")
    # beside integers a fraction takes the default dtype, which may be another one when the program runs
    alike = type(value) is int or all(t.is_floating_point() for t in others)
    alike = alike and all(torch.result_type(t, made) is torch.result_type(t, value) for t in others)
    return made if alike else value
