"""What a commit costs in a real vLLM: `deltasync bench commit`, also on a GPU.

python -m benchmarks.commit [--device cuda] [--size 0.6b] [--json]
"""

from deltasync.cli.bench import commit_command

if __name__ == "__main__":
    commit_command()
