import sys
from pathlib import Path

# golden_inputs serves here too
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "golden"))
