"""`python -m engine`: the studio's engine without a browser."""

import gc
import sys

from engine.cli import main

if __name__ == "__main__":
    code = main()
    gc.freeze()  # or the interpreter looks for half a second through what ends with it anyway
    sys.exit(code)
