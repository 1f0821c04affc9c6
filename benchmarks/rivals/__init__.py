"""Other systems' own code, from the package index, on the deltas of real runs (`benchmarks.corpus`)."""
