import sys
from pathlib import Path

# golden_inputs and torchao_oracle serve benchmarks/record_golden.py too
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "golden"))
