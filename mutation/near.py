"""Which tests stand near a source file: the longest prefix of its path that is named here says so, nearest tests first.

Quick ones only, since a mutant that no test notices runs them all: a file, or a test in it ("file::test").
`python -m mutation --list` prints how long each of them takes.
"""

from __future__ import annotations

_CONTEST = tuple(
    f"formats/test_four_over_six.py::test_{name}"
    for name in (
        "options_that_there_are_not", "ties_after_the_shift", "an_amax_from_elsewhere", "blocks_at_the_edges",
        "nan_and_inf_stay_in_their_block", "the_scale_for_four_is_one_and_a_half_times_the_unrounded_scale_for_six",
        "an_absmax_below_the_smallest_bfloat16_counts_as_that", "tiles_and_the_whole_have_the_same_bytes",
        "bytes_are_the_oracles",
    )
)  # fmt: skip
_HF = tuple(
    f"integrations/test_hf.py::test_{name}"
    for name in (
        "foreign_checkpoints", "checkpoint_that_does_not_fit_the_model", "config_of_the_future",
        "weights_that_were_loaded_as_something_else_are_named", "model_class_of_choice",
    )
)  # fmt: skip
_CONVERT = (
    "integrations/test_convert_mistakes.py",
    *(
        f"integrations/test_convert.py::test_{name}"
        for name in (
            "every_tensor_of_a_file_lies_aligned", "one_file_and_transformers_own_loader",
            "an_interrupted_conversion_leaves_nothing_that_looks_whole",
            "a_weight_that_overflows_in_the_models_dtype_is_refused", "tied_weights_are_found_under_either_name",
            "dtype_is_what_from_pretrained_gives", "other_files_come_along_and_other_weights_do_not",
        )
    ),
)  # fmt: skip
NEAR: dict[str, tuple[str, ...]] = {
    "formats/": ("formats/test_blockscaled.py", "formats/test_formats.py"),
    "formats/base.py": ("formats/test_held_scales.py", "formats/test_formats.py"),
    "formats/elements.py": ("formats/test_elements.py", "formats/test_integer.py", "formats/test_formats.py"),
    "formats/scales.py": ("formats/test_elements.py", "formats/test_held_scales.py", "formats/test_blockscaled.py"),
    "formats/blockscaled.py": ("formats/test_blockscaled.py", "formats/test_held_scales.py", "formats/test_formats.py"),
    "formats/integer.py": (
        "formats/test_integer.py", "formats/test_held_scales.py", "formats/test_formats.py", "targets/test_torchao_bugs.py",
    ),
    "formats/float8.py": ("formats/test_float8.py", "formats/test_held_scales.py", "formats/test_formats.py"),
    "formats/four_over_six.py": _CONTEST,
    "formats/contest.py": _CONTEST,
    "formats/gridflip.py": (*_CONTEST, "formats/test_gridflip.py"),
    "formats/dialects.py": ("formats/test_dialects.py", "formats/test_formats.py"),
    "formats/search.py": ("formats/test_dialects.py",),
    "formats/stochastic.py": ("formats/test_stochastic.py",),
    "formats/random.py": ("formats/test_stochastic.py",),
    "formats/layout.py": ("formats/test_layout.py", "formats/test_integer.py", "formats/test_int4_golden.py"),
    "formats/hqq.py": ("ops/test_int4_layouts.py",),
    "formats/tinygemm.py": ("ops/test_int4_layouts.py",),
    "formats/mslk.py": ("ops/test_int4_layouts.py", "ops/test_mslk_adapter.py"),
    "formats/int4.py": ("formats/test_integer.py", "formats/test_int4_golden.py", "ops/test_int4_layouts.py"),
    "formats/stretched.py": ("formats/test_formats.py", "formats/test_held_scales.py"),
    "formats/operand.py": ("formats/test_transforms.py", "formats/test_stochastic.py", "layers/test_as_nn_linear.py"),
    "transforms/": ("formats/test_transforms.py",),
    "transforms/rotation.py": ("formats/test_stochastic.py",),
    "transforms/wush.py": ("formats/test_wush.py",),
    "ops/call.py": ("ops/test_scaled_mm.py", "layers/test_prepared_converted.py::test_ragged_shapes", "ops/test_ops.py"),
    "ops/contracts.py": ("ops/test_scaled_mm.py", "layers/test_prepared_converted.py::test_ragged_shapes", "ops/test_ops.py"),
    "ops/define.py": ("ops/test_ops.py", "layers/test_compiled_graph.py"),
    "ops/encoding.py": ("ops/test_codec.py", "ops/test_ops.py"),
    "ops/linear.py": ("ops/test_scaled_mm.py", "ops/test_ops.py"),
    "ops/lookup.py": ("layers/test_embedding.py",),
    "ops/codec/": ("ops/test_codec.py", "ops/test_qutlass.py", "ops/test_csrc_calls.py"),
    "ops/tiles.py": ("ops/test_codec.py", _CONTEST[-2]),
    "ops/router.py": ("ops/test_ops.py",),
    "ops/gemm/reference.py": ("ops/test_scaled_mm.py", "layers/test_prepared_converted.py::test_ragged_shapes", "ops/test_ops.py"),
    "ops/gemm/tinygemm.py": ("ops/test_int4_layouts.py",),
    "ops/backward.py": ("layers/test_quantized_backward.py",),
    "layers/": ("layers/test_prepared_converted.py::test_ragged_shapes", "layers/test_autocast.py", "layers/test_saved_bytes.py"),
    "layers/linear.py": (
        "layers/test_prepared_converted.py::test_ragged_shapes",
        "layers/test_prepared_converted.py::test_the_layout_of_an_input_is_part_of_the_contract", "layers/test_quantized_backward.py",
        "layers/test_autocast.py", "layers/test_saved_bytes.py", "layers/test_siblings.py",
    ),
    "layers/function.py": (
        "layers/test_prepared_converted.py::test_ragged_shapes", "layers/test_quantized_backward.py", "layers/test_saved_bytes.py",
        "layers/test_transformed_layers.py", "layers/test_held_layers.py", "layers/test_as_nn_linear.py",
    ),
    "layers/recipe.py": ("layers/test_as_nn_linear.py", "formats/test_held_scales.py", "formats/test_transforms.py"),
    "layers/law.py": ("layers/test_as_nn_linear.py", "layers/test_quantized_backward.py"),
    "layers/saved.py": ("layers/test_saved_bytes.py", "layers/test_held_layers.py", "layers/test_transformed_layers.py"),
    "layers/shared_inputs.py": ("layers/test_siblings.py",),
    "layers/held.py": ("layers/test_held_layers.py",),
    "layers/embedding.py": ("layers/test_embedding.py",),
    "layers/packed.py": ("layers/test_packed_layer.py", "model/test_packed_linear.py"),
    "tensor.py": ("model/test_packed_linear.py", "parallel/test_shards.py", "model/test_state_dict.py"),
    "targets/": ("targets/test_every_torchao_config.py", "targets/test_torchao_bugs.py", "layers/test_fake_quantize_configs.py"),
    "targets/int4.py": ("targets/test_int4_targets.py",),
    "targets/integers.py": ("targets/test_torchao_bugs.py", "targets/test_every_torchao_config.py", "targets/test_static_torchao.py"),
    "targets/floats.py": ("targets/test_torchao_bugs.py", "targets/test_every_torchao_config.py", "targets/test_static_torchao.py"),
    "planning/": ("model/test_api.py", "model/test_undo.py", "model/test_sharing.py", "model/test_meta.py"),
    "parallel/linear.py": ("parallel/test_shards.py", "parallel/test_one_rank.py"),
    "integrations/peft.py": ("integrations/test_peft.py",),
    "integrations/peft_gradients.py": ("integrations/test_peft_gradients.py",),
    "integrations/stream.py": _CONVERT,
    "integrations/safetensors_file.py": _CONVERT,
    "integrations/skeleton.py": (*_CONVERT, "integrations/test_renamed.py"),
    "integrations/fp_quant.py": ("integrations/test_fp_quant.py",),
    "integrations/hf.py": (*_HF, "integrations/test_hf_embeddings.py"),
    "integrations/checkpoint.py": _HF,
}  # fmt: skip


def tests_near(file: str) -> tuple[str, ...]:
    """Test files of a source file (a path below aoquant/), as paths below test/; none where the table has no word on
    it.
    """
    prefixes = [prefix for prefix in NEAR if file.startswith(prefix)]
    return NEAR[max(prefixes, key=len)] if prefixes else ()
