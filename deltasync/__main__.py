"""`python -m deltasync`: the command where no script directory is on the path."""

from deltasync.cli import main

main(prog_name="deltasync")
