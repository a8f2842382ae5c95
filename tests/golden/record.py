"""Records the answers of the stories anew: `python -m tests.golden.record [STORY …]`."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.golden.stories import ANSWERS, STORIES, run_story

if __name__ == "__main__":
    for name in sys.argv[1:] or STORIES:
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SWITCHYARD_DATA"] = f"{folder}/data"
            (work := Path(folder) / "work").mkdir()
            answers = run_story(name, work)
        ANSWERS.mkdir(exist_ok=True)
        (ANSWERS / f"{name}.json").write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
        seconds, codes = time.process_time() - start, [answer["code"] for answer in answers]
        print(f"{name}: {seconds:.1f} processor seconds, exit codes {codes}", flush=True)
