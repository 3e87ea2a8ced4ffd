"""Makes the kernel importable from its source folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "torch-ext"))
