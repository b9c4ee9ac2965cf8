"""A python of another machine, where one thing differs:

    python other_machine.py WHAT -m octavo.runtime.remote_rank

stands for the python of a machine that has another version of octavo, another model and so on.
"""

from __future__ import annotations

import dataclasses
import sys
import time

what, dash_m, module = sys.argv[1:]
assert (dash_m, module) == ("-m", "octavo.runtime.remote_rank")

import octavo.kernels.cpu.library as library  # noqa: E402
from octavo.models import model_content  # noqa: E402
from octavo.runtime import rank_facts, remote_rank  # noqa: E402
from octavo.serving import remote_follower  # noqa: E402
from octavo.system import machine  # noqa: E402

if what == "version":
    rank_facts.__version__ = "0.0.7"
elif what == "kernels":
    rank_facts.OCT_ABI_VERSION += 1
elif what == "model":
    remote_follower.fingerprint = lambda path: {
        **model_content.fingerprint(path),
        "digest of the model's weights": "others",
    }
elif what == "no-model":
    remote_follower.Path = lambda path: model_content.Path(path + "-elsewhere")
elif what == "processor":
    library._this_cpu = lambda: dataclasses.replace(machine.cpu(), isa=())
elif what.startswith("memory="):
    free = int(what.partition("=")[2])
    machine.memory = lambda: machine.Memory(1 << 30, free, None)
elif what == "follower":
    from octavo.serving import stage_ranks

    stage_ranks._FOLLOWER = "refusing_follower"
elif what == "silent":
    time.sleep(600)
elif what == "stage":
    remote_rank.stage_facts = lambda stages, stage: rank_facts.stage_facts(stages + 1, stage)
elif what == "talks":
    print("a line for people", file=sys.stderr)
    sys.exit(7)
sys.exit(remote_rank.main())
