"""`python -m engine`: the studio's engine without a browser."""

import gc
import signal
import sys

if __name__ == "__main__":
    # Whoever ends a command politely is answered as Ctrl-C is: what is being written is put away, and a line says so.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from engine.cli import main  # which takes a second, in which one may press Ctrl-C

        code = main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = 130
    gc.freeze()  # or the interpreter looks for half a second through what ends with it anyway
    sys.exit(code)
