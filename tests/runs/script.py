"""What `lightkeeper launch` runs in these tests: one of the loops, with its options as JSON."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import loops

if __name__ == "__main__":
    loops.run(json.loads(sys.argv[1]))
