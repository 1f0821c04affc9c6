"""The loops over elements: diff, scatter and fingerprint, one module per machine.

`reference` is plain numpy and the truth; `cpu` is numba, compiled once per machine (the cache lies beside the module)
and free of the GIL. All modules have the same functions and are property-tested against each other.
"""
