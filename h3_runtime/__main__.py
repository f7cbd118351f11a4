"""python -m h3_runtime: see cli.py."""

import signal
import sys

from .cli import main


def _stop(*_) -> None:
    """``kill``, ``timeout`` and a container's end tidy up as Ctrl-C does."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
