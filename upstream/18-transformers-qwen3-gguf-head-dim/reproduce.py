"""The head dimension of a Qwen3 GGUF is not read."""

from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

assert "attention.key_length" not in GGUF_CONFIG_MAPPING["qwen3"]
assert GGUF_CONFIG_MAPPING["gemma2"]["attention.key_length"] == "head_dim"
