"""GRPO with TRL's own trainer: rollouts come from the packed model that will be served, and it follows every step.

    python examples/grpo.py

The model in training is prepared; its packed copy generates. Before each rollout `refresh_` writes the codes of the
weights as they are now into the copy, in place, so the policy that samples is the policy that is trained: its
log-probabilities are the same bits, and no correction for a mismatch is needed. The model is the embedded demo, the
reward counts one word: put your own in their place.
"""

import copy
import tempfile
import warnings

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from aoquant import QATConfig, quantize_, refresh_
from aoquant.integrations.text import assets

PROMPTS = ["The river is", "In the north", "The town has", "A small house"]
TOKENS = 8


@torch.no_grad()
def log_probabilities(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Of the generated tokens: (rows, TOKENS)."""
    rows = model(ids, attention_mask=mask).logits[:, -TOKENS - 1 : -1].float().log_softmax(-1)
    return rows.gather(2, ids[:, -TOKENS:, None])[..., 0]


class PackedRollouts:
    """TRL's `rollout_func`: a completion for every prompt, by the packed copy."""

    def __init__(self, packed: nn.Module) -> None:
        self.packed, self.rollouts = packed, 0

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[list[float]]]:
        trained = trainer.accelerator.unwrap_model(trainer.model)
        refresh_(self.packed, trained)
        tokenizer = trainer.processing_class
        asked = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        ids = self.packed.generate(**asked, do_sample=True, min_new_tokens=TOKENS, max_new_tokens=TOKENS)
        mask = torch.cat([asked["attention_mask"], torch.ones(len(prompts), TOKENS, dtype=torch.int64)], 1)
        sampled = log_probabilities(self.packed, ids, mask)
        assert torch.equal(sampled, log_probabilities(trained, ids, mask))
        self.rollouts += 1
        unpadded = tokenizer(prompts)["input_ids"]
        return {"prompt_ids": unpadded, "completion_ids": ids[:, -TOKENS:].tolist(), "logprobs": sampled.tolist()}


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(text.count(" the")) for text in completions]


def main(folder: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(str(assets()), dtype=torch.float32)
    quantize_(model, QATConfig("int4-g32", step="prepare"))
    packed = copy.deepcopy(model).eval()
    quantize_(packed, QATConfig(step="convert"))
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": TOKENS, "max_steps": 2}
    quiet = {"bf16": False, "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    config = GRPOConfig(folder, learning_rate=1e-3, gradient_checkpointing=False, logging_steps=1, **sizes, **quiet)
    data, tokenizer = Dataset.from_dict({"prompt": PROMPTS * 4}), AutoTokenizer.from_pretrained(str(assets()))
    rollouts = PackedRollouts(packed)
    warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
    GRPOTrainer(model, reward, config, data, processing_class=tokenizer, rollout_func=rollouts).train()
    print(f"{rollouts.rollouts} rollouts by the packed copy, with the log-probabilities of the model in training")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
