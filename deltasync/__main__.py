"""`python -m deltasync`: the command where no script directory is on the path."""

from deltasync.ops.cli import main

main(prog_name="deltasync")
