"""The product's code under a seed: one thread at a time, a virtual clock, and a store with faults.

    scheduler   threads, locks and waits, one at a time
    shown       threads, clocks and chance as the product's modules see them, and no real ones beside them
    store       a store with the semantics of S3 or of the Hub, and faults by the seed
    world       processes (publishers, replicas, a relay, maintenance, an outsider), and what must hold after each step
    mutants     planted faults of the product that a few seeds must find

`python -m tests.simulator --seed N --trace` repeats a run to the byte. Processes differ from the real ones in
this: they share one interpreter, so a process that is killed only never runs again.
"""
