"""Which tests stand near a source file: the longest prefix of its path that is named here says so, nearest tests first.

Quick ones only, since a mutant that no test notices runs them all: a file, or a test in it ("file::test"). All tests of
a source file together take less than about half a minute on one core. `python -m tools.mutation --list` prints how
long each of them takes.
"""

from __future__ import annotations


def _of(file: str, *names: str) -> tuple[str, ...]:
    """Some tests of one file, by their names without "test_"."""
    return tuple(f"{file}::test_{name}" for name in names)


_CONTEST = _of(
    "formats/test_four_over_six.py",
    "options_that_there_are_not", "ties_after_the_shift", "an_amax_from_elsewhere", "blocks_at_the_edges",
    "the_scale_for_four_is_one_and_a_half_times_the_unrounded_scale_for_six",
    "an_absmax_below_the_smallest_bfloat16_counts_as_that",
    "rounding_to_values_is_rounding_to_codes", "floored_blocks_hold_no_four_under_the_smallest_scale",
    "rows_of_any_length_are_looked_at", "bytes_are_the_oracles",
)  # fmt: skip
_HF = (
    *_of(
        "integrations/test_hf.py",
        "a_damaged_or_foreign_checkpoint_is_refused_by_name", "newer_schema_is_refused_by_every_loader",
        "a_lost_shard_and_a_tensor_that_no_shard_has_are_named",
        "weights_that_were_loaded_as_something_else_are_named",
        "what_cannot_be_saved_is_refused_and_nothing_is_written",
    ),
    *_of(
        "integrations/test_renamed.py",
        "the_class_to_load_with_is_named", "a_lost_part_of_a_renamed_tensor_is_noticed_before_loading",
    ),
    *_of("integrations/test_hf_embeddings.py", "one_of_a_pair_that_the_config_ties_is_refused"),
)  # fmt: skip
_CONVERT = (
    "integrations/test_convert_mistakes.py",
    *_of(
        "integrations/test_convert.py",
        "every_tensor_of_a_file_lies_aligned",
        "an_interrupted_conversion_leaves_nothing_that_looks_whole",
        "a_weight_that_overflows_in_the_models_dtype_is_refused", "tied_weights_are_found_under_either_name",
        "dtype_is_what_from_pretrained_gives", "other_files_come_along_and_other_weights_do_not",
    ),
)  # fmt: skip
_GEMM = ("ops/test_scaled_mm.py", "linear/test_prepared_converted.py::test_ragged_shapes", "ops/test_ggml.py")
_CODEC = _of(
    "ops/test_codec.py",
    "the_reference_runs_and_the_others_say_why_not", "forcing_triton_on_a_cpu_is_an_error_with_its_reason",
    "a_backend_of_gemms_leaves_the_codec_free", "values_are_the_formats",
    "a_gemm_takes_values_made_in_passing_and_a_weight_as_it_is", "options_without_a_kernel_are_refused",
    "what_triton_takes_of_a_transform", "triton_hands_on_what_a_transform_makes_of_high_precision",
    "what_the_cuda_encoder_reads", "transforms_and_masks_of_the_reference",
    "decoded_values_in_high_precision_are_memory_of_their_own", "matrices_of_two_tiles_are_cut",
    "the_cuda_encoder_takes_what_the_codec_hands_over", "widths_without_a_kernel_are_refused",
)  # fmt: skip
_EXPERTS_NAMED = _of(
    "linear/test_experts_named.py",
    "names_choose_a_module_or_one_parameter", "experts_that_are_not_whole_or_run_elsewhere_are_refused",
)  # fmt: skip
_EXPERTS_REFUSED = _of(
    "linear/test_experts_named.py",
    "what_experts_cannot_take_is_refused_by_name", "classes_without_the_protocol_are_refused_by_name",
)  # fmt: skip
_EXPERTS_RUN = _of(
    "linear/test_experts.py",
    "a_checkpoint_from_before_a_backward_that_draws_begins_at_step_zero", "experts_without_a_gate",
    "tokens_of_other_ranks_add_nothing", "fake_quantisation_is_switched_off_and_undone",
    "a_parameter_that_is_not_prepared_is_multiplied_as_the_plain_class_does",
)  # fmt: skip
_EXPERTS = (
    *_of("hybrid/test_hybrid_experts.py", "23_prepared_is_a_loop_of_prepared_linear_layers"),
    *_EXPERTS_NAMED, *_EXPERTS_REFUSED, *_EXPERTS_RUN,
)  # fmt: skip
_PACKED_EXPERTS = _of(
    "linear/test_packed_experts.py",
    "packed_experts_are_selected_cut_turned_and_copied", "what_packed_experts_cannot_do_is_refused",
)  # fmt: skip
_CACHES = (
    *_of(
        "kv/test_kv_cache.py",
        "layers_and_cache_together", "at_once_and_by_name", "refusals", "a_name_that_matches_no_attention_module_warns",
        "names_beside_layers", "skip_incompatible_leaves_out_the_caches_that_cannot", "uncalibrated_scales_warn_once",
    ),
    *_of(
        "kv/test_kv_recipes.py",
        "arguments_win_over_the_recipe", "layers_and_skip_keep_the_cache", "a_recipe_by_name",
        "convert_takes_the_cache_of_prepare", "a_filter_chooses_layers", "a_model_without_attention_is_refused",
    ),
)  # fmt: skip
_PACKED_LAYER = ("linear/test_packed_layer.py", "linear/test_packed_compiled.py")
_WHOLE_MODELS = (
    "model/test_coverage.py", "model/test_owners.py", "model/test_recipe_names.py", "model/test_api.py",
    "model/test_sharing.py", "model/test_meta.py",
)  # fmt: skip
NEAR: dict[str, tuple[str, ...]] = {
    "formats/delayed.py": ("hybrid/test_delayed_scaling.py",),
    "formats/": ("formats/test_blockscaled.py", "formats/test_formats.py"),
    "formats/__init__.py": ("formats/test_transforms.py", "formats/test_held_scales.py", "formats/test_formats.py"),
    "formats/base.py": (
        "formats/test_held_scales.py", "formats/test_formats.py", "formats/test_wush.py::test_slices",
        "linear/test_embedding.py::test_encoding_some_rows_gives_their_part_of_the_whole",
    ),
    "formats/elements.py": (
        "formats/test_elements.py", "formats/test_integer.py",
        "formats/test_four_over_six.py::test_rounding_to_values_is_rounding_to_codes", "formats/test_blockscaled.py",
        "formats/test_formats.py",
    ),
    "formats/kv.py": ("formats/test_kv_formats.py",),
    "formats/scales.py": ("formats/test_elements.py", "formats/test_dialects.py", "formats/test_held_scales.py", "formats/test_blockscaled.py"),
    "formats/blockscaled.py": ("formats/test_blockscaled.py", "formats/test_held_scales.py", "formats/test_formats.py"),
    "formats/integer.py": (
        "formats/test_integer.py", "formats/test_held_scales.py", "formats/test_formats.py", "targets/test_torchao_bugs.py",
    ),
    "formats/fixed.py": ("formats/test_held_scales.py", "formats/test_blockscaled.py"),
    "formats/float8.py": ("formats/test_float8.py", "formats/test_held_scales.py", "formats/test_formats.py"),
    "formats/four_over_six.py": _CONTEST,
    "formats/contest.py": _CONTEST,
    "formats/gridflip.py": (*_CONTEST, *_of("formats/test_formats.py", "unknown_names_list_the_nearest"), "formats/test_gridflip.py"),
    "formats/dialects.py": ("formats/test_dialects.py", "formats/test_formats.py"),
    "formats/search.py": ("formats/test_dialects.py",),
    "formats/stochastic.py": ("formats/test_stochastic.py",),
    "formats/random.py": ("formats/test_stochastic.py",),
    "formats/layout.py": ("formats/test_layout.py", "formats/test_integer.py", "formats/test_int4_golden.py"),
    "formats/hqq.py": ("ops/test_int4_layouts.py",),
    "formats/tinygemm.py": ("ops/test_int4_layouts.py", "formats/test_held_scales.py"),
    "formats/mslk.py": ("formats/test_engines.py", "ops/test_mslk_adapter.py", "ops/test_int4_layouts.py"),
    "formats/int4.py": (
        "formats/test_integer.py", "formats/test_int4_golden.py", "ops/test_int4_layouts.py", "model/test_unpack.py",
    ),
    "formats/ggml.py": ("formats/test_engines.py", "ops/test_ggml.py", "formats/test_formats.py"),
    "formats/vllm.py": ("formats/test_engines.py", "formats/test_formats.py"),
    "formats/te_float8.py": ("formats/test_te_float8.py", "formats/test_formats.py"),
    "formats/mx_square.py": ("hybrid/test_hybrid_formats.py", "formats/test_blockscaled.py", "formats/test_formats.py"),
    "formats/stretched.py": (
        *_of("formats/test_formats.py", "stretched_values_are_the_nearest_levels",
             "a_stretched_value_saturates_half_a_step_beyond_the_largest_level", "names_are_unique_and_numerics_differ_by_name"),
        "formats/test_held_scales.py", "formats/test_formats.py",
    ),
    "formats/operand.py": ("formats/test_transforms.py", "formats/test_stochastic.py", "linear/test_as_nn_linear.py"),
    "transforms/": ("formats/test_transforms.py", "hybrid/test_hybrid_formats.py"),
    "transforms/rotation.py": ("formats/test_stochastic.py",),
    "transforms/wush.py": ("formats/test_wush.py",),
    "ops/call.py": (*_GEMM, *_of("ops/test_codec.py", "a_gemm_takes_values_made_in_passing_and_a_weight_as_it_is")),
    "ops/contracts.py": _GEMM,
    "ops/define.py": (
        *_of("ops/test_codec.py", "a_gemm_takes_values_made_in_passing_and_a_weight_as_it_is", "values_are_the_formats",
             "ordinary_tensors_meet_no_dispatcher"),
        "ops/test_ops.py::test_bias_gradient_op_is_well_formed", "ops/test_ops.py::test_scaled_mm_is_well_formed",
    ),
    "ops/encoding.py": (*_CODEC, "linear/test_embedding.py"),
    "ops/product.py": (
        *_GEMM, "hybrid/test_hybrid_contract.py",
        *_of("ops/test_ops.py", "bias_gradient_op_is_well_formed", "scaled_mm_is_well_formed", "scaled_mm_that_measures_is_well_formed"),
    ),
    "ops/lookup.py": ("linear/test_embedding.py",),
    "ops/codec/reference.py": (*_CODEC, *_of("ops/test_codec.py", "transposed_codes_are_those_of_the_transpose")),
    "ops/codec/cpu.py": _of("ops/test_cpu_kernels.py", "values_are_the_formats", "matrices_are_encoded_as_the_format_does"),
    "ops/codec/": ("ops/test_qutlass.py", "ops/test_csrc_calls.py", *_CODEC),
    "formats/tiles.py": (*_CODEC, "ops/test_codec.py::test_floored_blocks_are_counted_in_tiles",
        "ops/test_codec.py::test_tiles_are_the_whole",
        *_of("ops/test_one_call.py", "blocks_of_rows_give_the_product", "the_reference_decodes_a_large_weight_by_blocks")),
    "ops/router.py": ("model/test_routes.py", *_of(
        "ops/test_ops.py",
        "explain_gives_every_backend_a_verdict_and_one_runs", "explain_names_the_shape_that_a_kernel_refuses",
        "forcing_runs_that_backend_and_only_inside_the_block", "forcing_a_backend_that_cannot_run_says_why",
        "forcing_by_the_environment", "a_route_is_asked_for_once_and_again_when_backends_or_force_change",
    )),
    "ops/gemm/reference.py": (
        *_GEMM, "linear/test_prepared_converted.py::test_fp8_blocks_against_exact_sums",
        "linear/test_prepared_converted.py::test_the_layout_of_an_input_is_part_of_the_contract",
        "ops/test_ops.py::test_reference_int8_equals_int_mm",
    ),
    "ops/gemm/torch_int4.py": (
        *_of("targets/test_int4_targets.py", "tile_packed_takes_any_activation_and_rounds_it_to_bf16",
             "convert_says_what_is_missing_and_leaves_the_model"),
        "ops/test_int4_layouts.py",
    ),
    "ops/delayed_scales.py": ("hybrid/test_delayed_scaling.py",),
    "ops/linear_plan.py": ("ops/test_one_call.py",),
    "ops/gemm/one_call.py": ("ops/test_one_call.py", *_PACKED_LAYER),
    "ops/backward.py": (
        "hybrid/test_hybrid_contract.py",
        "ops/test_codec.py::test_transposed_codes_are_those_of_the_transpose",
        "linear/test_quantized_backward.py::test_gradients_equal_the_reference",
    ),
    "linear/": ("linear/test_prepared_converted.py::test_ragged_shapes", "linear/test_as_nn_linear.py"),
    "linear/weight_codes.py": _of(
        "model/test_masters_experts.py",
        "a_master_that_was_written_is_packed_under_autocast",
        "a_master_that_was_written_or_loaded_is_packed_before_the_next_forward",
        "frozen_experts_and_other_precisions", "steps_equal_the_float32_models",
    ),
    "linear/direct_reads.py": ("model/test_direct_reads.py",),
    "experts/": (*_EXPERTS, *_PACKED_EXPERTS),
    "experts/prepared.py": (
        *_EXPERTS, *_PACKED_EXPERTS, "linear/test_experts.py::test_a_traced_model_is_the_eager_one",
        "distributed/test_placements.py::test_prepared_experts_of_a_rank_take_tokens_of_other_ranks",
    ),
    "linear/packed_parts.py": ("linear/test_packed_compiled.py", "integrations/test_parts_fit.py"),
    "experts/sharded.py": ("distributed/test_placements.py", *_EXPERTS),
    "experts/routers.py": ("model/test_routing.py",),
    "_messages.py": ("model/test_arguments.py", "model/test_undo.py"),
    "report/routing.py": ("model/test_routing.py",),
    "linear/packed_moves.py": (
        "linear/test_packed_moves.py", "model/test_state_dict.py",
        *_of("formats/test_wush.py", "slices", "rows_of_another_transform_are_not_fused_in", "rows_of_the_same_transform_are_fused_in"),
    ),
    "experts/packed_experts.py": (*_PACKED_EXPERTS, *_EXPERTS),
    "experts/stack.py": ("linear/test_read_stacks.py",),
    "linear/fast_path.py": ("model/test_fast_path.py",),
    "linear/function.py": (
        "linear/test_as_nn_linear.py", "linear/test_prepared_converted.py::test_ragged_shapes",
        *_of("formats/test_held_scales.py", "all_gradients_of_a_learned_layer", "frozen_parts_of_a_learned_layer"),
        "linear/test_prepared_converted.py::test_the_layout_of_an_input_is_part_of_the_contract", "linear/test_autocast.py",
        "linear/test_transformed_layers.py", "linear/test_quantized_backward.py", "hybrid/test_delayed_scaling.py",
        *_of("linear/test_saved_bytes.py", "bytes_for_each_value_of_the_input", "double_quantisation_keeps_no_row",
             "a_step_encodes_each_side_once", "a_side_that_no_gemm_reads_is_not_encoded"),
        *_of("linear/test_fixed_weights.py", "each_side_of_a_weight_is_encoded_once"),
        *_of("distributed/test_one_rank.py", "delayed_scales_under_tensor_parallelism_are_refused"),
    ),
    "linear/fixed_weights.py": _of(
        "linear/test_fixed_weights.py", "a_weight_or_scale_that_changes_is_refused_by_name",
        "a_step_of_an_optimizer_changes_the_weights_with_gradients", "each_side_of_a_weight_is_encoded_once",
        "copies_are_outside_of_the_block", "blocks_nest_and_end_with_an_error", "micro_batches_and_rollouts",
    ),
    "linear/held.py": ("formats/test_held_scales.py", *_of(
        "linear/test_held_layers.py", "the_state_dict_holds_them", "dynamic_recipes_add_no_key",
        "casts_move_the_layer_and_leave_the_numbers", "a_float_checkpoint_brings_no_scales",
    ), *_of("targets/test_static_torchao.py", "the_scale_has_the_dimensions_that_calibration_saw_after_a_resume_too")),
    "linear/kinds.py": ("integrations/test_conv1d.py", "model/test_coverage.py"),
    "linear/law.py": (
        "linear/test_as_nn_linear.py", "linear/test_quantized_backward.py",
        *_of("hybrid/test_hybrid_config.py", "mismatches_are_refused_at_construction"),
    ),
    "linear/packed.py": (*_PACKED_LAYER, "model/test_packed_linear.py"),
    "linear/bound.py": (*_PACKED_LAYER, "linear/test_batch_invariant_layers.py::test_a_layer"),
    "linear/prepared.py": (
        "linear/test_as_nn_linear.py", "linear/test_prepared_converted.py::test_ragged_shapes",
        *_of("linear/test_held_layers.py", "the_state_dict_holds_them", "a_float_checkpoint_brings_no_scales",
             "convert_takes_the_scales_as_they_are"),
        *_of("model/test_calibrate.py", "static_on_the_batch_it_was_calibrated_on_is_dynamic"), "model/test_api.py",
        "linear/test_fixed_weights.py::test_micro_batches_and_rollouts",
        *_of("linear/test_quantized_backward.py", "the_state_is_a_buffer_of_training_alone",
             "a_copy_draws_on_and_looks_for_its_own_rank"),
        *_of("hybrid/test_delayed_scaling.py", "a_checkpoint_without_a_history_begins_anew", "a_margin_makes_factors_smaller"),
    ),
    "linear/recipe.py": (
        *_of("hybrid/test_delayed_scaling.py", "other_casts_are_refused", "formats_with_other_scales_are_refused",
             "recipes_of_other_histories_read_differently"),
        "linear/test_batch_invariant_layers.py::test_a_layer",
        "linear/test_as_nn_linear.py", "formats/test_held_scales.py", "formats/test_transforms.py",
        "hybrid/test_hybrid_contract.py",
    ),
    "linear/cache.py": _of(
        "linear/test_shared_inputs.py", "an_input_that_changes_between_two_layers_is_encoded_again",
        "a_write_that_autograd_cannot_see_spoils_no_later_call", "without_gradients", "formats_do_not_mix", "views",
        "under_autocast", "codes_die_with_their_input_and_what_autograd_keeps",
        "one_encoding_one_storage_and_the_same_bits", "a_packed_layer_sees_what_was_written",
        "a_buffer_that_is_used_again_is_read_again",
    ),
    "linear/embedding.py": ("linear/test_embedding.py",),
    "linear/tensor.py": (
        "model/test_packed_linear.py",
        *_of("linear/test_embedding.py", "a_packed_weight_is_not_renormalised_and_not_an_index", "prepared_equals_converted"),
        *_of("linear/test_packed_moves.py", "a_weight_is_an_inference_tensor_where_its_codes_are"),
        *_of("formats/test_wush.py", "prepared_equals_converted", "moves_and_casts_never_round_the_matrices"),
    ),
    "targets/": ("targets/test_every_torchao_config.py", "targets/test_torchao_bugs.py", "linear/test_fake_quantize_configs.py"),
    "targets/no_rows.py": _of(
        "targets/test_no_rows.py",
        "a_layer_of_a_case", "a_layer_with_static_scales", "a_gradient_and_autocast_pass_through_a_converted_layer",
    ),
    "targets/stored_parts.py": (
        *_of(
            "integrations/test_parts_fit.py",
            "tiles_of_int4_are_checked_when_they_are_built", "torchaos_tensors_are_checked_when_they_are_built",
            "a_folder_with_a_wrong_description_is_refused_at_once",
        ),
        "integrations/test_hf.py::test_round_trip_is_bit_equal[nvfp4-weight-only-bfloat16-tied]",
    ),
    "targets/kernels.py": ("targets/test_kernels_here.py",),
    "targets/torchao_int4.py": ("targets/test_int4_targets.py",),
    "targets/torchao_integers.py": ("targets/test_torchao_bugs.py", "targets/test_every_torchao_config.py", "targets/test_static_torchao.py"),
    "targets/torchao_floats.py": ("targets/test_torchao_bugs.py", "targets/test_every_torchao_config.py", "targets/test_static_torchao.py"),
    "planning/": _WHOLE_MODELS,
    "planning/caches.py": _CACHES,
    "planning/choose.py": (
        *_WHOLE_MODELS, *_EXPERTS_NAMED, *_of("linear/test_experts_named.py", "convert_without_prepare_says_so"),
    ),
    "planning/coverage.py": ("model/test_coverage.py", *_EXPERTS_NAMED),
    "planning/stack_changes.py": (
        *_EXPERTS_NAMED, *_EXPERTS_REFUSED, *_EXPERTS_RUN, "distributed/test_placements.py", "model/test_coverage.py",
        *_of("integrations/test_moe.py", "experts_alone_are_trained_converted_saved_and_loaded"),
    ),
    "planning/fused.py": (
        "export/test_fused_siblings.py::test_a_module_alone_has_no_siblings", "export/test_recipes_served.py", "formats/test_engines.py"),
    "planning/owners.py": ("model/test_owners.py", "model/test_coverage.py", "model/test_meta.py"),
    "planning/plan.py": (
        *_WHOLE_MODELS, *_EXPERTS_NAMED, "hybrid/test_hybrid_config.py",
        *_of("model/test_calibrate.py", "layers_that_share_a_weight_cannot_hold_scales"),
        *_of("targets/test_static_torchao.py", "nvfp4_step_prepare_calibrate_step_convert_is_torchaos"),
    ),
    "planning/restore.py": ("model/test_undo.py",),
    "planning/tied.py": (
        "model/test_coverage.py", "model/test_sharing.py",
        *_of("integrations/test_peft.py", "quantising_under_adapters_is_refused", "merge_is_undone_exactly_and_adapters_are_added_once"),
    ),
    "distributed/sharded_linear.py": ("distributed/test_placements.py", "distributed/test_shards.py", "distributed/test_one_rank.py"),
    "integrations/peft.py": ("integrations/test_peft.py",),
    "integrations/peft_gradients.py": ("integrations/test_peft_gradients.py",),
    "integrations/stream.py": _CONVERT,
    "files/safetensors_file.py": ("integrations/test_checksums.py", *_CONVERT),
    "integrations/stream_sources.py": (*_CONVERT, "integrations/test_moe_convert.py"),
    "files/stored_names.py": (
        "integrations/test_cast_models.py", "integrations/test_moe_convert.py", "integrations/test_renamed.py",
    ),
    "integrations/skeleton.py": (*_CONVERT, "integrations/test_renamed.py"),
    "integrations/fp_quant.py": ("integrations/test_fp_quant.py",),
    "integrations/hf.py": (
        *_HF, "integrations/test_hf_embeddings.py",
    ),
    "files/checkpoint.py": _HF,
}  # fmt: skip


def tests_near(file: str) -> tuple[str, ...]:
    """Test files of a source file (a path below aoquant/), as paths below test/; none where the table has no word on
    it.
    """
    prefixes = [prefix for prefix in NEAR if file.startswith(prefix)]
    return NEAR[max(prefixes, key=len)] if prefixes else ()
