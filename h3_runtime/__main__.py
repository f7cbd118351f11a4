"""python -m h3_runtime: see cli.py."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
