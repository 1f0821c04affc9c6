"""`python -m deltasync`: a tour where nothing is asked, else the command, for where no script directory is on the path."""

import sys

if len(sys.argv) > 1:
    from deltasync.ops.cli import main

    main(prog_name="deltasync")
else:
    from deltasync.ops.cli.tour import run

    run()
