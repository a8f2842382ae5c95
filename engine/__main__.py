"""`python -m engine`: the studio's engine without a browser."""

import gc
import signal
import sys

if __name__ == "__main__":
    # SIGTERM ends a command as Ctrl-C does: drafts of files are removed, and a line says so.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from engine.cli import main  # takes a second, in which Ctrl-C may come

        code = main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = 130
    gc.freeze()  # else the interpreter spends half a second on objects that end with it anyway
    sys.exit(code)
