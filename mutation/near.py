"""Which tests stand near a source file: the longest prefix of its path that is named here says so, nearest tests first.

Only quick files, since a mutant that no test notices runs them all. `python -m mutation --list` prints how long each of them takes.
"""

from __future__ import annotations

NEAR: dict[str, tuple[str, ...]] = {
    "formats/": ("formats/test_formats.py", "formats/test_blockscaled.py"),
    "formats/base.py": ("formats/test_formats.py", "formats/test_held_scales.py"),
    "formats/elements.py": ("formats/test_elements.py", "formats/test_integer.py", "formats/test_formats.py"),
    "formats/scales.py": ("formats/test_elements.py", "formats/test_held_scales.py", "formats/test_blockscaled.py"),
    "formats/blockscaled.py": ("formats/test_blockscaled.py", "formats/test_formats.py", "formats/test_held_scales.py"),
    "formats/integer.py": (
        "formats/test_integer.py", "formats/test_formats.py", "formats/test_held_scales.py", "targets/test_torchao.py",
    ),
    "formats/float8.py": ("formats/test_float8.py", "formats/test_formats.py", "formats/test_held_scales.py"),
    "formats/four_over_six.py": ("formats/test_four_over_six.py",),
    "formats/contest.py": ("formats/test_four_over_six.py",),
    "formats/gridflip.py": ("formats/test_four_over_six.py", "formats/test_gridflip.py"),
    "formats/dialects.py": ("formats/test_dialects.py", "formats/test_formats.py"),
    "formats/search.py": ("formats/test_dialects.py",),
    "formats/stochastic.py": ("formats/test_stochastic.py",),
    "formats/rotated.py": ("formats/test_stochastic.py",),
    "formats/random.py": ("formats/test_stochastic.py",),
    "formats/layout.py": ("formats/test_layout.py", "formats/test_formats.py"),
    "formats/hqq.py": ("ops/test_int4_layouts.py",),
    "formats/tinygemm.py": ("ops/test_int4_layouts.py",),
    "formats/mslk.py": ("ops/test_int4_layouts.py", "ops/test_mslk_adapter.py"),
    "formats/int4.py": ("formats/test_integer.py", "formats/test_int4_golden.py", "ops/test_int4_layouts.py"),
    "formats/stretched.py": ("formats/test_formats.py", "formats/test_held_scales.py"),
    "formats/transformed.py": ("formats/test_transforms.py",),
    "transforms/": ("formats/test_transforms.py",),
    "transforms/wush.py": ("formats/test_wush.py",),
    "ops/call.py": ("ops/test_scaled_mm.py", "ops/test_ops.py", "layers/test_prepared_converted.py"),
    "ops/contracts.py": ("ops/test_scaled_mm.py", "ops/test_ops.py", "layers/test_prepared_converted.py"),
    "ops/parts.py": ("ops/test_scaled_mm.py", "ops/test_ops.py"),
    "ops/tiles.py": ("ops/test_codec.py", "formats/test_four_over_six.py"),
    "ops/router.py": ("ops/test_ops.py",),
    "ops/gemm/reference.py": ("ops/test_scaled_mm.py", "ops/test_ops.py", "layers/test_prepared_converted.py"),
    "ops/gemm/tinygemm.py": ("ops/test_int4_layouts.py",),
    "ops/backward.py": ("layers/test_quantized_backward.py",),
    "layers/": ("layers/test_training.py", "layers/test_prepared_converted.py"),
    "layers/linear.py": (
        "layers/test_training.py", "layers/test_quantized_backward.py", "layers/test_saved_bytes.py",
        "layers/test_prepared_converted.py",
    ),
    "layers/shared_inputs.py": ("layers/test_siblings.py",),
    "layers/held.py": ("layers/test_held_layers.py",),
    "layers/embedding.py": ("layers/test_embedding.py",),
    "tensor.py": ("model/test_packed_linear.py", "parallel/test_shards.py", "model/test_state_dict.py"),
    "targets/": ("targets/test_torchao.py", "targets/test_static_torchao.py", "layers/test_fake_quantize_configs.py"),
    "targets/int4.py": ("targets/test_int4_targets.py",),
    "targets/integers.py": ("targets/test_torchao.py", "targets/test_torchao_bugs.py", "targets/test_static_torchao.py"),
    "targets/floats.py": ("targets/test_torchao.py", "targets/test_torchao_bugs.py", "targets/test_static_torchao.py"),
    "planning/": ("model/test_api.py", "model/test_undo.py", "model/test_sharing.py", "model/test_meta.py"),
    "parallel/linear.py": ("parallel/test_shards.py", "parallel/test_one_rank.py"),
    "integrations/peft.py": ("integrations/test_peft.py",),
    "integrations/peft_gradients.py": ("integrations/test_peft_gradients.py",),
    "integrations/stream.py": ("integrations/test_convert.py", "integrations/test_convert_mistakes.py"),
    "integrations/slots.py": ("integrations/test_convert.py", "integrations/test_convert_mistakes.py"),
    "integrations/skeleton.py": ("integrations/test_convert.py", "integrations/test_renamed.py"),
    "integrations/fp_quant.py": ("integrations/test_fp_quant.py",),
    "integrations/hf.py": ("integrations/test_hf.py", "integrations/test_hf_embeddings.py"),
    "integrations/checkpoint.py": ("integrations/test_hf.py",),
}  # fmt: skip


def tests_near(file: str) -> tuple[str, ...]:
    """Test files of a source file (a path below aoquant/), as paths below test/; none where the table has no word on it."""
    prefixes = [prefix for prefix in NEAR if file.startswith(prefix)]
    return NEAR[max(prefixes, key=len)] if prefixes else ()
