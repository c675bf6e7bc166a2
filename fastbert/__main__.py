"""`python -m fastbert` and the `fastbert` command start here.

Nothing above `main` imports much, so that Ctrl-C ends quietly while torch is being imported, which takes
seconds.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Import the command line and run it; returns the exit status."""
    # An exception could be swallowed or replaced by the modules being imported, so this handler exits. The
    # command line sets its own handlers while it runs.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from fastbert.cli.main import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
