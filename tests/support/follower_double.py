"""A follower of a group that does no more than its settings say: see test_followers.py."""

from __future__ import annotations

import os
import sys
import time

from octavo.base.errors import ConfigError


def serve(membership, settings, home):
    group = membership.messages
    home.send({"rank": group.rank, "environment": sorted(os.environ)})
    {
        "steps": follow_steps,
        "refuses": refuse,
        "talks": talk,
        "echoes": echo,
        "returns": lambda *_: None,
        "hangs": lambda *_: time.sleep(600),
        "works": work,
    }[settings["does"]](group, settings, home)


def follow_steps(group, settings, home):
    """A step: a message says how many meetings it has."""
    while True:
        for _ in range(group.receive()[0]):
            group.meet()


def echo(group, settings, home):
    while True:
        home.send({"words": int(group.receive().sum())})


def work(group, settings, home):
    """Compute for some time, and then say so."""
    end = time.process_time() + settings["seconds"]
    while time.process_time() < end:
        pass
    home.send({"worked": True})
    time.sleep(600)


def refuse(group, settings, home):
    if group.rank == settings["who"]:
        raise ConfigError("there is no room for this rank")
    home.receive()  # nothing comes


def talk(group, settings, home):
    for number in range(1000):
        print(f"line {number}", file=sys.stderr)
    os.write(2, b"half a line")
    os._exit(7)
