"""Measure and check everything that deltasync does on a GPU: `python -m benchmarks.gpu`."""
