"""The engine's process, with a model that takes for ever to load: ``start`` says how, and a file
to make when it begins."""

import re
import sys
import time
from pathlib import Path

from octavo.server.engine import worker


def load(args, *_):
    Path(args["file"]).touch()
    if args["holds_the_interpreter"]:
        re.match("(a+)+$", "a" * 64 + "b")  # no thread can run meanwhile
    while True:
        time.sleep(60)


worker._load = load

if __name__ == "__main__":
    sys.exit(worker.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
