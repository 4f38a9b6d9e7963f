"""Launches in the words that csrc's library reads: numbers, addresses, and maps of tensors that are read in boxes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cpu_library import with_step_library

from aoquant.ops import native_program, native_step
from aoquant.ops.native_program import Boxes, Kernel

# what Triton 3.6 says of a map of bfloat16
MAP = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 128, 64], "fp4_padded": False}


@pytest.fixture
def library() -> Iterator[Any]:
    yield from with_step_library()


@pytest.mark.parametrize(
    ("sizes", "strides", "box"),
    [([], [], []), ([6, 4], [], [6, 4]), ([6, 4], [24], [6]), ([6, 4], [24], [6, 257]), ([2] * 6, [16] * 5, [2] * 6)],
)
def test_the_library_refuses_a_map_of_other_dimensions(sizes: Any, strides: Any, box: Any, library: Any) -> None:
    words = native_program.launch(Kernel(1 << 40, [1, 1, 1], 32, 0, [Boxes(9, 3, sizes, strides, box)]), [0])
    with pytest.raises(RuntimeError, match=r"a program.s word|a program maps a tensor"):
        native_step.operator("program_make")([1, 0, 1, *map(int, words), 0], "", 1, [])


def test_a_descriptor_in_words_is_what_tritons_launcher_makes_of_it() -> None:
    """Sizes, strides in bytes and the box, the innermost first; bfloat16 has another number in the driver; then the
    shape and the strides.
    """
    boxes, *rest = native_program.described(MAP, [3, 256, 512], [131072, 512, 1], "zero")
    assert boxes == Boxes(9, 3, [512, 256, 3], [1024, 262144], [64, 128, 1])
    assert rest == [3, 256, 512, 131072, 512, 1]
    words = native_program.launch(Kernel(7, [132, 1, 1], 256, 99, [None, boxes, 5]), [4, 2])
    assert words[:7] == [native_program.LAUNCH, 7, 132, 1, 1, 256, 99]
    assert words[7:] == [3, 1, 4, 2, 2, 9, 3, 3, 512, 256, 3, 2, 1024, 262144, 3, 64, 128, 1, 0, 5]


@pytest.mark.parametrize(
    ("more", "padding"), [({"fp4_padded": True}, "zero"), ({"is_im2col": False}, "zero"), ({}, "nan")]
)
def test_a_map_with_more_to_it_has_no_words(more: dict[str, Any], padding: str) -> None:
    with pytest.raises(ValueError, match="an unknown map"):
        native_program.described(MAP | more, [3, 256, 512], [131072, 512, 1], padding)


def test_the_words_of_a_compiled_kernel() -> None:
    pytest.importorskip("triton")
    from aoquant.ops.triton import launch

    x = torch.empty(256, 512, dtype=torch.bfloat16)
    meta = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0}
    meta |= {"profile_scratch_size": 0, "num_warps": 8, "warp_size": 32, "shared": 99}
    of_x = MAP | {"block_size": [128, 64]}
    signature = {"x_desc": "tensordesc<bf16[128,64]>", "y_ptr": "*fp32", "n": "i32", "s": "fp32", "B": "constexpr"}
    given = [launch.described(x, 128, 64), torch.empty(4), 5, 1.0, 64]

    def native(**other: Any) -> Kernel | None:
        fields = SimpleNamespace(**meta | {"tensordesc_meta": [of_x]} | other)
        kernel = SimpleNamespace(metadata=fields, src=SimpleNamespace(signature=signature), function=7)
        return launch._native(kernel, (132, 1, 1), given)

    boxes = Boxes(9, 3, [512, 256], [1024], [64, 128])
    parameters = [boxes, 256, 512, 512, 1, None, 5, native_program.bits(1.0)]
    assert native() == Kernel(7, (132, 1, 1), 256, 99, parameters)
    for other in (None, [], [{**of_x, "fp4_padded": True}]):  # None, []: descriptors that the device reads
        assert native(tensordesc_meta=other) is None
    assert native(launch_pdl=True) is native(num_ctas=2) is native(global_scratch_size=8) is None


def test_only_a_plain_tensor_of_the_programs_device_is_made_by_words() -> None:
    t, cpu, meta = torch.empty(2, 3), torch.device("cpu"), torch.device("meta")
    assert native_program.make(t, cpu, 0) is not None
    others = (t, meta), (t.to(meta), cpu), (t.to_sparse(), cpu), (t.to(torch.complex64), cpu)
    assert [native_program.make(other, device, 0) for other, device in others] == [None] * 4
