"""Benchmarks that users can run: `deltasync bench`. Ratios against a peer or the machine's own limit, in the same run."""
