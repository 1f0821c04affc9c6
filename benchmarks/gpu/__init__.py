"""Everything that deltasync does on a GPU, measured and checked on this machine's: `python -m benchmarks.gpu`."""
