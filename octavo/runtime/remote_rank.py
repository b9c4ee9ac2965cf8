"""The process of the first rank of a stage on another machine than the home rank's.

    python -m octavo.runtime.remote_rank

takes a ticket from its environment or from standard input (``octavo/links/ticket.py``), connects to
the home rank, and runs ``serve(membership, settings, home)`` of the module that this one names, as
``rank_process.py`` does on the home rank's machine. It ends with its link to the home rank, and
with the process that has started it::

    home rank    stage, ranks of each stage, module, settings            ->
                 <-  ticket for the stage before, if there is one
                 ticket of the stage behind, if that is not the home rank  ->
                 ... what `serve` and the home rank say to each other
                 <-  an error, if there is one
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from octavo.base.errors import LinkError, OctavoError, PeerEndedError
from octavo.kernels.parts import Stage
from octavo.links.handshake import connect
from octavo.links.link import Link
from octavo.links.listener import Listener
from octavo.links.ticket import Address, parse_ticket, receive_ticket
from octavo.runtime.home_connection import ERROR, MESSAGES, HomeConnection
from octavo.runtime.rank_facts import software_facts, stage_facts
from octavo.system.child_process import end_with_parent
from octavo.system.machine import without_blas_threads

# Seconds from the end of the link to the home rank until this process is ended, whatever it does.
_SECONDS_TO_END = 10.0
# Until the stage before has connected: it is started at the same time.
_SECONDS_TO_CONNECT = 120.0


def main() -> int:
    """Run a rank to its end; returns the exit status."""
    end_with_parent()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the home rank, which ends this one
    try:
        with connect(receive_ticket(), software_facts(), purpose="rank 0") as home:
            home.when_it_ends(_end_soon)
            home.start(MESSAGES)
            return _run(home)
    except PeerEndedError:
        return 1  # another rank has said why
    except OctavoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _run(home: Link) -> int:
    connection = HomeConnection(home)
    with ExitStack() as links:
        try:
            start = home.receive_message()
            membership = _connect_to_stages(home, start, links)
            import_module(start["module"]).serve(membership, start["settings"], connection)
        except (PeerEndedError, LinkError):
            raise
        except Exception as error:
            connection.send({ERROR: f"{type(error).__name__}: {error}"})
            raise
    return 0


def _connect_to_stages(home: Link, start: dict[str, Any], links: ExitStack) -> Any:
    """Return the membership of this rank, once it is connected to the stages beside it."""
    with without_blas_threads():
        from octavo.runtime.machine_links import MachineLink, ReceivedMessages  # numpy
        from octavo.runtime.rank_memory import Membership
        from octavo.runtime.stage_links import PipelinePlace

    stage, tp = Stage(*start["stage"]), int(start["tp"])
    num_stages = stage.count
    rank = (num_stages - 1 - stage.index) * tp

    def joined(link: Link) -> Link:
        links.callback(link.close)
        link.start({})
        link.when_it_ends(home.end)
        return link

    incoming, outgoing = None, MachineLink(home)
    if stage.is_first:
        home.send_message({"ticket": None})
    else:
        listener = Listener(Address(home.local_host))
        links.callback(listener.close)
        before = f"rank {rank + tp}"
        invitation = listener.invite(before, stage_facts(num_stages, stage.index - 1))
        home.send_message({"ticket": invitation.ticket.secret_text()})
    behind = home.receive_message()["ticket"]
    if behind is not None:
        facts = stage_facts(num_stages, stage.index)
        link = connect(parse_ticket(behind), facts, purpose=f"rank {rank - tp}")
        outgoing = MachineLink(joined(link))
    if not stage.is_first:
        link = joined(invitation.wait(_SECONDS_TO_CONNECT))
        incoming = MachineLink(link, {})
        listener.close()
    messages = ReceivedMessages(home)
    place = PipelinePlace(stage, messages, incoming, outgoing)
    return Membership(rank, num_stages * tp, messages, None, place)


def _end_soon(why: LinkError) -> None:
    timer = threading.Timer(_SECONDS_TO_END, os._exit, [1])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
