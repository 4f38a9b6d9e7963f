"""Mutants that no test can notice, each with the argument why. They count neither as killed nor as survivors.

A mutant is named by its file and its line before and after, as the results state them, so the list outlives changes
elsewhere in a file. An entry whose line is gone is reported: remove it.
"""

from __future__ import annotations

from typing import NamedTuple


class Equivalent(NamedTuple):
    file: str
    before: str
    after: str
    why: str


_CARRY = (
    "A sum that carries beyond q s and z is a bit longer than the longer of the two. Without the 1 a sum is taken as exact whose last bit "
    "may then not fit into `wide`. At that distance of the two nothing carries with bf16 scales (|z| <= 2^e - 2^(e - 8), "
    "|q s| < 2^(e - 13)), nor with float32's (2^(e - 24), 2^(e - 26)). With float16's 1288 of 2^20 pairs of mantissas, over all q and signs, "
    "do lose a bit; it lies far from any midpoint, and each of them rounds to the same float16 and bfloat16."
)
_MORE = "More sums are rounded to odd than need be. One that is exact stays what it is, so only time is lost."
_TIME = "Either way computes the same; the other one takes longer."
_ENGINE = "The autograd engine casts a gradient to the dtype of the input that it belongs to, as this cast does."

EQUIVALENT = [
    Equivalent(
        "formats/elements.py",
        "first, last = torch.maximum(e_s + 3, e_z) + 1, torch.minimum(e_s, e_z) - bits",
        "first, last = torch.maximum(e_s + 3, e_z) + 0, torch.minimum(e_s, e_z) - bits",
        _CARRY,
    ),
    Equivalent(
        "formats/elements.py",
        "first, last = torch.maximum(e_s + 3, e_z) + 1, torch.minimum(e_s, e_z) - bits",
        "first, last = torch.maximum(e_s + 3, e_z) + 2, torch.minimum(e_s, e_z) - bits",
        _MORE,
    ),
    Equivalent(
        "formats/elements.py",
        "return (first - last <= 1 - int(math.log2(torch.finfo(wide).eps))) | (s == 0) | (z == 0)",
        "return (first - last <= 1 - int(math.log2(torch.finfo(wide).eps))) | (s == 0) & (z == 0)",
        _MORE,
    ),
    Equivalent(
        "integrations/peft/gradients.py",
        "dx = (grad @ packed_value(w).to(grad.dtype)).to(x_dtype) if needs_x else None",
        "dx = (grad @ packed_value(w).to(grad.dtype)) if needs_x else None",
        _ENGINE,
    ),
    Equivalent(
        "integrations/peft/gradients.py",
        "db = grad.flatten(0, -2).sum(0).to(bias_dtype) if needs_bias else None",
        "db = (grad.flatten(0, -2).sum(0)) if needs_bias else None",
        _ENGINE,
    ),
    Equivalent(
        "formats/__init__.py",
        'return get_operand(name) if is_composed(name) and transforms.parse(name.partition("+")[0]) else _plain(name)',
        'return get_operand(name) if is_composed(name) or transforms.parse(name.partition("+")[0]) else _plain(name)',
        "A name with a plus is no plain format's, nor is a transform's name alone: both raise the same error of `_plain`.",
    ),
    Equivalent(
        "formats/base.py",
        "if self.tile_rows == 1:",
        "if self.tile_rows == 2:",
        "There are tiles of 1 and of 16 rows, and the largest of one row is that row.",
    ),
    Equivalent(
        "formats/elements.py",
        "if dtype == torch.float32 and s.dtype != torch.float32:",
        "if False:",
        "The way below sums the same exact product in float64, to odd, and rounds it to float32: one rounding too. "
        + _TIME,
    ),
    Equivalent(
        "formats/elements.py",
        "return q * s.float() + z.float() # the product is exact: 4 + 11 bits",
        "return q * (s) + z.float() # the product is exact: 4 + 11 bits",
        "A float32 tensor times a bfloat16 or float16 one is multiplied in float32.",
    ),
    Equivalent(
        "formats/integer.py",
        "x_RGB.float()",
        "(x_RGB)",
        "An extreme is the same number in every dtype; float32 is reduced faster.",
    ),
    Equivalent(
        "linear/function.py",
        "NO_GRADIENT = Needs(False, False, False, False, False)",
        "NO_GRADIENT = Needs(False, False, True, False, False)",
        "Nothing that is kept depends on the bias, and without a gradient what is kept is dropped.",
    ),
    Equivalent(
        "linear/bound.py",
        "m = x.numel() // k if k else 0",
        "m = x.numel() // k if k else 1",
        "No format has codes of K = 0, so k is never 0.",
    ),
    Equivalent(
        "linear/saved.py",
        "for kind, k in zip(*layout[1:], strict=True):",
        "for kind, k in zip(*layout[1:], strict=False):",
        "`flat` makes both lists of one value each of the same tuple.",
    ),
    Equivalent(
        "ops/call.py",
        "if self.x_values is not None:",
        "if False:",
        "The values that came with the codes are what decoding the codes gives (test_codec.py). " + _TIME,
    ),
    Equivalent(
        "ops/gemm/reference.py",
        "row_sums = c.w_format.integers(c.w).sum(-1).float()",
        "row_sums = (c.w_format.integers(c.w).sum(-1))",
        "A float32 tensor times an int64 one converts the integers to float32, as the cast does.",
    ),
    Equivalent(
        "ops/gemm/reference.py",
        "y_MN = y_MN - ((c.x.zero.float() * c.x.scales) * row_sums).to(c.dtype)",
        "y_MN = y_MN - (((c.x.zero) * c.x.scales) * row_sums).to(c.dtype)",
        "An int8 tensor times a float32 one is multiplied in float32.",
    ),
    Equivalent(
        "ops/gemm/torch_int4.py",
        'Backend("torch._weight_int4pack_mm_for_cpu", 10, _why_not_cpu, _cpu, reads_codes=True),',
        'Backend("torch._weight_int4pack_mm_for_cpu", 11, _why_not_cpu, _cpu, reads_codes=True),',
        "Of the other backends only the reference, of priority 0, takes what this one takes.",
    ),
    Equivalent(
        "files/safetensors_file.py",
        "return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data",
        "return (values).cpu().contiguous().view(-1).view(torch.uint8).numpy().data",
        "Integers have no gradient, so what is viewed as bytes is detached by that.",
    ),
    Equivalent(
        "formats/tiles.py",
        "if total * k < 2 * tile or not (x_RK.is_cuda or x_RK.is_cpu):",
        "if total * k < 3 * tile or not (x_RK.is_cuda or x_RK.is_cpu):",
        "Tiles have the bytes of the whole, so from which size on a matrix is cut is a question of speed.",
    ),
    Equivalent(
        "formats/elements.py",
        "return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)",
        "return table.index_select((-1), codes.view(torch.uint8).flatten().int()).view(codes.shape)",
        "The table has one dimension.",
    ),
    Equivalent(
        "linear/function.py",
        'if w_held is not None and recipe.weight_scales == "learned":',
        'if w_held is not None or recipe.weight_scales == "learned":',
        "A static scale then is an argument of autograd's, too, which has no gradient.",
    ),
    Equivalent(
        "integrations/teacher_cache.py",
        'n = stored["blocks"].shape[0] if "blocks" in stored else 0',
        'n = stored["blocks"].shape[0] if "blocks" in stored else 1',
        "A file without blocks lacks a tensor, and is refused whatever n is.",
    ),
    Equivalent(
        "formats/kv.py",
        "codes = _half_away(y).clamp(-128, 127).nan_to_num(0.0).to(torch.int8)",
        "codes = (_half_away(y).clamp(-128, 127)).to(torch.int8)",
        "C++ leaves the cast of NaN to an integer open, and x86, Arm and CUDA make 0 of it.",
    ),
    Equivalent(
        "ops/codec/cuda.py",
        "if r.rows * r.k > VALUES:",
        "if r.rows * r.k >= VALUES:",
        "Triton's kernel encodes the same bytes, so from which size on it runs is a question of speed.",
    ),
    Equivalent(
        "ops/backward.py",
        'if contract != "aoquant": # codes are what its kernel reads',
        "if False: # codes are what its kernel reads",
        "The values that are then made too are not read by a kernel that multiplies codes. " + _TIME,
    ),
    Equivalent(
        "linear/tensor.py",
        "k: int = 0,",
        "k: int = 1,",
        "The default is for a packed tensor in the place of the codes, whose constructor returns before it reads k.",
    ),
    Equivalent(
        "ops/codec/whole.py",
        "LEAST = 1 << 21 # values",
        "LEAST = 2 << 21 # values",
        "Triton's kernel encodes the same bytes, so from which size on this one runs is a question of speed.",
    ),
    Equivalent(
        "linear/function.py",
        "measured=measured if needs_dx and x.device.type in ONE_PASS else None,",
        "measured=measured if needs_dx and x.device.type not in ONE_PASS else None,",
        "A scale that forward measured of W is the one that backward finds of the same W. " + _TIME,
    ),
    Equivalent(
        "linear/weight_codes.py",
        "nowhere = Place(Span(0, 0), Span(0, 0)) # nothing of it is drawn",
        "nowhere = Place(Span((-1), 0), Span(0, 0)) # nothing of it is drawn",
        "Only random numbers depend on the place, and `why_not` refuses operands that have any.",
    ),
    Equivalent(
        "formats/kv.py",
        "q = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).float()",
        "q = (torch.stack((packed & 15, packed >> 4), -1).flatten(-2))",
        "A uint8 tensor minus a float32 one is subtracted in float32.",
    ),
    Equivalent(
        "experts/grouped_linear.py",
        "dw = dw.to(ctx.w_dtype)",
        "dw = (dw)",
        "Autograd gives a gradient its parameter's dtype.",
    ),
    Equivalent(
        "ops/gemm/qutlass.py",
        "y_MN = (y_MN.float() * ratio.t()).to(c.dtype)",
        "y_MN = ((y_MN) * ratio.t()).to(c.dtype)",
        "A bfloat16 tensor times a float32 one is multiplied in float32.",
    ),
    Equivalent(
        "export/modelopt.py",
        'tensors = {"weight": p.qdata, "weight_scale": p.encoded.scales, "weight_scale_2": outer[0].clone()}',
        'tensors = {"weight": p.qdata, "weight_scale": p.encoded.scales, "weight_scale_2": outer[(-1)].clone()}',
        "`one_outer` gives one value.",
    ),
    Equivalent(
        "ptq/gptq.py",
        "values_NK, codes_NK = (torch.cat(halves) for halves in zip(*made, strict=True))",
        "values_NK, codes_NK = (torch.cat(halves) for halves in zip(*made, strict=False))",
        "`_rounded` makes pairs.",
    ),
    Equivalent(
        "transforms/wush.py",
        "return parts[0] if len(parts) == 1 else torch.cat(parts)",
        "return parts[(-1)] if len(parts) == 1 else torch.cat(parts)",
        "The first of one part is its last.",
    ),
    Equivalent(
        "ops/contracts.py",
        'if contract == "aoquant": # takes everything, and a compiled layer need not watch the table',
        "if False: # takes everything, and a compiled layer need not watch the table",
        "The rest of the function finds nothing against that contract. " + _TIME,
    ),
    Equivalent(
        "integrations/text.py",
        "ids = torch.tensor([[self.separator, 1, 2, 3, self.separator, 4, 5]], device=next(model.parameters()).device)",
        "ids = torch.tensor([[self.separator, 2, 2, 3, self.separator, 4, 5]], device=next(model.parameters()).device)",
        "Any tokens of two documents do.",
    ),
    Equivalent(
        "ptq/blocks.py",
        "last[0] = output[0] if isinstance(output, tuple | list) and output else output",
        "last[(-1)] = output[0] if isinstance(output, tuple | list) and output else output",
        "`last` has one element.",
    ),
    Equivalent(
        "ops/codec/__init__.py",
        "if operand.format.narrow_of_float32:",
        "if False:",
        "Such a format encodes as its narrow one does in float32; that one has a GPU's kernels. " + _TIME,
    ),
    Equivalent(
        "ops/native_cpu.py",
        'extremes = torch.tensor([-128, 127], dtype=torch.int8, device="cpu")',
        'extremes = torch.tensor([-128, 126], dtype=torch.int8, device="cpu")',
        "Sums of two products that are held in 16 bits saturate at -128 times -128 either way.",
    ),
    Equivalent(
        "ops/stacks.py",
        "TURNED = 1 << 25 # bytes of a transposed stack that are turned at a time: what an L2 cache holds",
        "TURNED = 0 << 25 # bytes of a transposed stack that are turned at a time: what an L2 cache holds",
        "One expert is turned at a time. " + _TIME,
    ),
]
