"""`python -m engine`: the studio's engine without a browser."""

import sys

from engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
