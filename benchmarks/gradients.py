"""What a backward in low precision costs each layer of a trained model: dx and dW of every mix, in dB against float.

    python benchmarks/gradients.py --model DIR --text FILE [--recipes ...] [--windows 8] [--length 512]

DIR is a Hugging Face folder with its tokenizer. The mixes are those of docs/hybrid.md. One batch of text runs through
the model's language-model loss; each prepared layer's dx and dW are compared with those of the same layer in float for
the same input and the same gradient (`aoquant.report(gradients=True)`), so no layer inherits another one's error. Rows
are appended to benchmarks/results/gradients.csv.
"""

from __future__ import annotations

import argparse
import copy
import lzma
import sys
from pathlib import Path

import torch
from beside import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from aoquant import quantize_, report
from aoquant.recipes import get_recipe

MIXES = ("fp8-hybrid", "mxfp8-hp", "nvfp4-hp", "mxfp8-nvfp4", "nvfp4-mxfp8", "nvfp4-training")


def text_of(path: Path, characters: int) -> str:
    """The beginning of a text, unpacked if it ends in .xz."""
    unpack = lzma.open if path.suffix == ".xz" else open
    with unpack(path, "rt", encoding="utf-8") as file:
        return str(file.read(characters))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--text", type=Path, required=True)
    add("--recipes", nargs="+", default=MIXES)
    add("--windows", type=int, default=8, help="windows in the batch")
    add("--length", type=int, default=512, help="tokens a window")
    add("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "gradients.csv")
    o = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(o.model)
    wanted = o.windows * o.length
    ids = tokenizer(text_of(o.text, 16 * wanted), return_tensors="pt")["input_ids"][0, :wanted]
    if len(ids) < wanted:
        raise SystemExit(f"--text holds {len(ids)} tokens; {wanted} are needed")
    ids = ids.view(o.windows, o.length).to(device)
    batch = {"input_ids": ids, "labels": ids}
    model = AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.bfloat16).to(device)
    table = Table(o.out, device)
    for recipe in o.recipes:
        prepared = copy.deepcopy(model)
        quantize_(prepared, get_recipe(recipe).prepare())
        for row in report(model, prepared, batch, gradients=True).layers:
            figures = {
                "dx_dB": row.input_gradient_sqnr_db,
                "dW_dB": row.weight_gradient_sqnr_db,
                "output_dB": row.output_sqnr_db,
            }
            table.add({"recipe": recipe, "tokens": wanted, "layer": row.fqn, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
