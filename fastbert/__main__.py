"""`python -m fastbert` is the `fastbert` command; the command itself starts here too.

Nothing above `main` imports much, so that Ctrl-C during the seconds that importing torch takes ends quietly.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Import the command line and run it; returns the exit status."""
    # Not an exception, which the modules being imported could swallow or turn into errors of their own. The
    # command line has handlers of its own while it runs.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from fastbert.cli.main import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
