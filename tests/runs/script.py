"""What `lightkeeper launch` runs in these tests: one of the loops, with its options as JSON.

A start again writes a trace of its own, as a trainer that a test starts again does, and so does each of several ranks.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import loops

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if int(os.environ["WORLD_SIZE"]) > 1:
        options["trace"] += "." + os.environ["RANK"]
    options["trace"] += "-again" * int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    loops.run(options)
