"""Which tests stand near a source file: the longest prefix of its path that is named here says so, nearest tests first.

Quick ones only, since a mutant that no test notices runs them all: a file, or a test in it ("file::test"). All tests of
a source file together take less than about half a minute on one core. `python -m mutation --list` prints how long each
of them takes.
"""

from __future__ import annotations


def _of(file: str, *names: str) -> tuple[str, ...]:
    """Some tests of one file, by their names without "test_"."""
    return tuple(f"{file}::test_{name}" for name in names)


_CONTEST = _of(
    "formats/test_four_over_six.py",
    "options_that_there_are_not", "ties_after_the_shift", "an_amax_from_elsewhere", "blocks_at_the_edges",
    "nan_and_inf_stay_in_their_block", "the_scale_for_four_is_one_and_a_half_times_the_unrounded_scale_for_six",
    "an_absmax_below_the_smallest_bfloat16_counts_as_that", "tiles_and_the_whole_have_the_same_bytes",
    "rounding_to_values_is_rounding_to_codes", "bytes_are_the_oracles",
)  # fmt: skip
_HF = (
    *_of(
        "integrations/test_hf.py",
        "foreign_checkpoints", "checkpoint_that_does_not_fit_the_model", "config_of_the_future",
        "weights_that_were_loaded_as_something_else_are_named", "model_class_of_choice", "truncated_weights",
        "missing_shard_and_lost_tensor", "lost_scale", "quantised_head_that_the_config_ties_is_refused_until_untied",
        "saving_over_another_layout_is_refused",
    ),
)  # fmt: skip
_CONVERT = (
    "integrations/test_convert_mistakes.py",
    *_of(
        "integrations/test_convert.py",
        "every_tensor_of_a_file_lies_aligned", "one_file_and_transformers_own_loader",
        "an_interrupted_conversion_leaves_nothing_that_looks_whole",
        "a_weight_that_overflows_in_the_models_dtype_is_refused", "tied_weights_are_found_under_either_name",
        "dtype_is_what_from_pretrained_gives", "other_files_come_along_and_other_weights_do_not",
    ),
)  # fmt: skip
_GEMM = ("ops/test_scaled_mm.py", "layers/test_prepared_converted.py::test_ragged_shapes", "ops/test_ggml.py")
_WHOLE_MODELS = (
    "model/test_coverage.py", "model/test_owners.py", "model/test_recipe_names.py", "model/test_api.py",
    "model/test_sharing.py", "model/test_meta.py",
)  # fmt: skip
NEAR: dict[str, tuple[str, ...]] = {
    "formats/": ("formats/test_blockscaled.py", "formats/test_formats.py"),
    "formats/__init__.py": ("formats/test_transforms.py", "formats/test_held_scales.py", "formats/test_formats.py"),
    "formats/base.py": (
        "formats/test_held_scales.py", "formats/test_formats.py", "formats/test_wush.py::test_slices",
        "layers/test_embedding.py::test_encoding_some_rows_gives_their_part_of_the_whole",
    ),
    "formats/elements.py": (
        "formats/test_elements.py", "formats/test_integer.py",
        "formats/test_four_over_six.py::test_rounding_to_values_is_rounding_to_codes", "formats/test_formats.py",
    ),
    "formats/scales.py": ("formats/test_elements.py", "formats/test_held_scales.py", "formats/test_blockscaled.py"),
    "formats/blockscaled.py": ("formats/test_blockscaled.py", "formats/test_held_scales.py", "formats/test_formats.py"),
    "formats/integer.py": (
        "formats/test_integer.py", "formats/test_held_scales.py", "formats/test_formats.py", "targets/test_torchao_bugs.py",
    ),
    "formats/fixed.py": ("formats/test_held_scales.py", "formats/test_blockscaled.py"),
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
    "formats/mslk.py": ("formats/test_engines.py", "ops/test_mslk_adapter.py", "ops/test_int4_layouts.py"),
    "formats/int4.py": ("formats/test_integer.py", "formats/test_int4_golden.py", "ops/test_int4_layouts.py"),
    "formats/ggml.py": ("formats/test_engines.py", "ops/test_ggml.py", "formats/test_formats.py"),
    "formats/vllm.py": ("formats/test_engines.py", "formats/test_formats.py"),
    "formats/te_float8.py": ("formats/test_te_float8.py", "formats/test_formats.py"),
    "formats/mx_square.py": ("hybrid/test_hybrid_formats.py", "formats/test_formats.py"),
    "formats/stretched.py": ("formats/test_formats.py", "formats/test_held_scales.py"),
    "formats/operand.py": ("formats/test_transforms.py", "formats/test_stochastic.py", "layers/test_as_nn_linear.py"),
    "transforms/": ("formats/test_transforms.py", "hybrid/test_hybrid_formats.py"),
    "transforms/rotation.py": ("formats/test_stochastic.py",),
    "transforms/wush.py": ("formats/test_wush.py",),
    "ops/call.py": (*_GEMM, "ops/test_ops.py::test_reference_int8_equals_int_mm"),
    "ops/contracts.py": _GEMM,
    "ops/define.py": ("ops/test_ops.py::test_scaled_mm_is_well_formed",),
    "ops/encoding.py": ("ops/test_codec.py", "layers/test_embedding.py"),
    "ops/linear.py": (*_GEMM, "ops/test_ops.py::test_bias_gradient_op_is_well_formed"),
    "ops/lookup.py": ("layers/test_embedding.py",),
    "ops/codec/": ("ops/test_codec.py", "ops/test_qutlass.py", "ops/test_csrc_calls.py"),
    "ops/tiles.py": ("ops/test_codec.py", _CONTEST[-3]),
    "ops/router.py": ("model/test_routes.py", *_of(
        "ops/test_ops.py",
        "explain_gives_every_backend_a_verdict_and_one_runs", "explain_names_the_shape_that_a_kernel_refuses",
        "forcing_runs_that_backend_and_only_inside_the_block", "forcing_a_backend_that_cannot_run_says_why",
        "forcing_by_the_environment", "a_route_is_asked_for_once_and_again_when_backends_or_force_change",
    )),
    "ops/gemm/reference.py": (*_GEMM, "ops/test_ops.py::test_reference_int8_equals_int_mm"),
    "ops/gemm/tinygemm.py": ("ops/test_int4_layouts.py",),
    "ops/backward.py": ("layers/test_quantized_backward.py",),
    "layers/": ("layers/test_prepared_converted.py::test_ragged_shapes", "layers/test_as_nn_linear.py"),
    "layers/direct_reads.py": ("model/test_direct_reads.py",),
    "layers/experts.py": ("layers/test_experts.py",),
    "layers/packed_experts.py": ("layers/test_experts.py",),
    "layers/fast_path.py": ("model/test_fast_path.py",),
    "layers/function.py": (
        "layers/test_as_nn_linear.py", "layers/test_prepared_converted.py::test_ragged_shapes",
        "layers/test_transformed_layers.py", "layers/test_quantized_backward.py",
    ),
    "layers/held.py": ("formats/test_held_scales.py", *_of(
        "layers/test_held_layers.py", "the_state_dict_holds_them", "dynamic_recipes_add_no_key",
        "casts_move_the_layer_and_leave_the_numbers", "a_float_checkpoint_brings_no_scales", "copies_and_switch",
    )),
    "layers/kinds.py": ("integrations/test_conv1d.py", "model/test_coverage.py"),
    "layers/linear.py": (
        "layers/test_as_nn_linear.py", "layers/test_prepared_converted.py::test_ragged_shapes",
        "layers/test_prepared_converted.py::test_the_layout_of_an_input_is_part_of_the_contract",
        "model/test_meta.py", "layers/test_autocast.py",
    ),
    "layers/law.py": ("layers/test_as_nn_linear.py", "layers/test_quantized_backward.py"),
    "layers/packed.py": ("layers/test_packed_layer.py", "model/test_packed_linear.py"),
    "layers/plan.py": ("layers/test_packed_layer.py",),
    "layers/qat.py": (
        "layers/test_as_nn_linear.py", "layers/test_prepared_converted.py::test_ragged_shapes", "model/test_api.py",
    ),
    "layers/recipe.py": ("layers/test_as_nn_linear.py", "formats/test_held_scales.py", "formats/test_transforms.py"),
    "layers/saved.py": ("layers/test_transformed_layers.py", "hybrid/test_hybrid_saved.py"),
    "layers/shared_inputs.py": ("layers/test_siblings.py",),
    "layers/sides.py": ("hybrid/test_hybrid_saved.py", "hybrid/test_hybrid_layer.py"),
    "layers/embedding.py": ("layers/test_embedding.py",),
    "tensor.py": ("model/test_packed_linear.py", "parallel/test_shards.py", "model/test_state_dict.py"),
    "targets/": ("targets/test_every_torchao_config.py", "targets/test_torchao_bugs.py", "layers/test_fake_quantize_configs.py"),
    "targets/int4.py": ("targets/test_int4_targets.py",),
    "targets/integers.py": ("targets/test_torchao_bugs.py", "targets/test_every_torchao_config.py", "targets/test_static_torchao.py"),
    "targets/floats.py": ("targets/test_torchao_bugs.py", "targets/test_every_torchao_config.py", "targets/test_static_torchao.py"),
    "planning/": _WHOLE_MODELS,
    "planning/experts.py": ("layers/test_experts.py", *_WHOLE_MODELS),
    "planning/fused.py": ("export/test_recipes_served.py", "formats/test_engines.py"),
    "planning/owners.py": ("model/test_owners.py", "model/test_coverage.py", "model/test_meta.py"),
    "planning/plan.py": (*_WHOLE_MODELS, "layers/test_experts.py"),
    "planning/progress.py": ("model/test_undo.py",),
    "parallel/linear.py": ("parallel/test_shards.py", "parallel/test_one_rank.py"),
    "integrations/peft.py": ("integrations/test_peft.py",),
    "integrations/peft_gradients.py": ("integrations/test_peft_gradients.py",),
    "integrations/stream.py": _CONVERT,
    "integrations/safetensors_file.py": ("integrations/test_checksums.py", *_CONVERT),
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
