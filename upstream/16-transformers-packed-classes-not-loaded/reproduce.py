"""Many classes cannot be loaded from packed codes."""

import tempfile

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from transformers import T5Config, T5ForConditionalGeneration

model = T5ForConditionalGeneration(T5Config(d_model=128, d_ff=128, num_layers=1, num_heads=4, d_kv=32, vocab_size=64))
scheme = preset_name_to_scheme("W4A16", ["Linear"])
apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
compressor = ModelCompressor.from_pretrained_model(model)
compressor.compress_model(model)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    compressor.update_config(folder)
    try:
        T5ForConditionalGeneration.from_pretrained(folder)
        message = ""
    except AttributeError as error:
        message = str(error)
assert message == "'Linear' object has no attribute 'weight'"
