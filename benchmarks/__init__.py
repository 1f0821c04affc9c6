"""Measurements: `python -m benchmarks.NAME --help`, from the root of the repository. Results are kept in
docs/results/.
"""

import sys
from pathlib import Path

# the demo, whose model and processes several of them use
sys.path.append(str(Path(__file__).parents[1] / "examples"))
