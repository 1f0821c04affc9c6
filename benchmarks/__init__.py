"""Measurements: `python -m benchmarks.NAME --help`, from the root of the repository. Results are kept in docs/results/."""
