"""`python -m deltasync.cli`: the command where no script directory is on the path."""

from deltasync.cli import main

main()
