"""A process that is asked, notes its id in the file it is given, and never answers."""

import os
import sys
import time
from pathlib import Path

from engine.files import write_atomically
from engine.parallel.processes import leave_with_parent

leave_with_parent()
write_atomically(Path(sys.argv[1]), str(os.getpid()))
time.sleep(60)
