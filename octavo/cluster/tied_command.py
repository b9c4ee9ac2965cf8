"""An octavo command that ends when the process that started it does, however that ends.

python -m octavo.cluster.tied_command serve MODEL ...
"""

from __future__ import annotations

import os
import sys

from octavo.system.child_process import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # which the command keeps, since it is the same process
    os.execv(sys.executable, [sys.executable, "-m", "octavo", *sys.argv[1:]])
