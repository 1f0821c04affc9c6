"""A publisher and replicas for as long as you like, under random faults: are all bits right, and is everything flat?

python -m tests.soak --minutes 60 --rate 2 --vllm     two vLLM servers on S3 (moto), through a proxy that fails at random
python -m tests.soak --versions 7000 --rate 6         replicas in host memory on a directory, through a store that does
python -m tests.soak --minutes 30 --chaos [--vllm]     the same, and everything is killed, replaced, restored, filled

Of every version that a replica serves, sha256 is compared with what the publisher wrote down before it published. Store
faults hit 1 % of all requests; now and then the store is away for a while, or a process is suspended for a while (SIGSTOP).
Of every acknowledgement that the publisher got, the replica's own list says whether it had those bits.
"""
