"""torchao configs that have no target here: why, and what to use instead.

An unknown config and a config that cannot be trained get different answers, so every class that torchao's
`quantize_` handles is either among the targets or here; a test walks torchao's own table and finds what a new version
adds. Read from the source of torchao 0.18.
"""

_CALIBRATED = "is found by running data through the model"
_TRAINING = "is a training recipe of torchao's and leaves no quantised layer"
_OWN = "aoquant.IntxWeightConfig, Int4WeightConfig or NVFP4WeightConfig"

# taken by `calibrate_ptq`, and by `quantize_` where one of them is the whole config, in torchao's steps
CALIBRATED = ("GPTQConfig", "AWQConfig", "SmoothQuantConfig")
_BY_ITSELF = "it for the whole model, quantize_(model, config) with step='prepare' and 'convert', aoquant.calibrate_ptq, or its base_config"

# class name -> (why it has no target, what to use instead)
REASONS: dict[str, tuple[str, str]] = {
    # grids that are not affine
    "CodebookWeightOnlyConfig": ("its codebook is found by k-means and has no gradient-free exact forward", _OWN),
    "GroupwiseLutWeightConfig": ("its lookup tables are found by k-means and its kernels are ARM's", _OWN),
    "GGUFWeightOnlyConfig": (
        "its scales are quantised a second time, for llama.cpp's Q4_K layout, and torchao skips layers with K % 256 != 0",
        "aoquant.Int4WeightConfig(32), then llama.cpp's own conversion",
    ),
    "NF4WeightOnlyConfig": (
        "NF4 is a storage format for QLoRA's frozen weights, with doubly quantised scales",
        "MXFP4WeightConfig or NVFP4WeightConfig with activation=None",
    ),
    # kernels that are not there
    "UIntxWeightOnlyConfig": (
        "its layout and rounding are gemlite's (or, in torchao.experimental, Apple MPS kernels')",
        "IntxWeightOnlyConfig or aoquant.IntxWeightConfig",
    ),
    "Int8DynamicActivationUIntxWeightConfig": (
        "its layout and rounding are gemlite's",
        "Int8DynamicActivationIntxWeightConfig",
    ),
    "IntNWeightOnlyConfig": ("torchao's own handler for it raises: it is broken there", "IntxWeightOnlyConfig"),
    "Float8DynamicActivationFloat8WeightOpaqueTensorConfig": (
        "its CPU kernel is not part of torchao's wheels, so no layer can be compared with it",
        "Float8DynamicActivationFloat8WeightConfig, or aoquant.FP8WeightConfig",
    ),
    "Int8DynamicActivationInt4WeightConfig": (
        "its kernel, torchao::da8w4_linear_cpu, is in no released torchao, so nothing is deployed that a prepared layer could equal",
        "Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)), or aoquant.IntxWeightConfig(4, activation='int8-row-asym'),",
    ),
    # sparsity
    "BlockSparseWeightConfig": ("it sparsifies and does not quantise", "torchao's quantize_ after training"),
    "SemiSparseWeightConfig": ("it sparsifies and does not quantise", "torchao's quantize_ after training"),
    # calibration
    "AWQConfig": (f"its scale per input channel {_CALIBRATED}", _BY_ITSELF),
    "SmoothQuantConfig": (f"its scale per input channel {_CALIBRATED}", _BY_ITSELF),
    "GPTQConfig": (f"its rounding {_CALIBRATED}", _BY_ITSELF),
    # training
    "BitNetTrainingConfig": (_TRAINING, "aoquant.IntxWeightConfig(2, activation='int8-row')"),
    "Int8WeightOnlyQuantizedTrainingConfig": (_TRAINING, "Int8WeightOnlyConfig"),
    "Int8MixedPrecisionTrainingConfig": (_TRAINING, "Int8DynamicActivationInt8WeightConfig"),
    "Float8BlockwiseLinearConfig": (_TRAINING, 'aoquant.FP8WeightConfig(granularity="block")'),
    "Float8TrainingOpConfig": (_TRAINING, "Float8DynamicActivationFloat8WeightConfig"),
    "MXFP8TrainingOpConfig": (_TRAINING, "MXDynamicActivationMXWeightConfig"),
    "NVFP4TrainingConfig": (_TRAINING, "NVFP4DynamicActivationNVFP4WeightConfig"),
    "IntXQuantizationAwareTrainingConfig": ("it is torchao's deprecated QAT config", "aoquant.QATConfig"),
    "FromIntXQuantizationAwareTrainingConfig": (
        "it is torchao's deprecated convert",
        "aoquant.QATConfig(step='convert')",
    ),
}
