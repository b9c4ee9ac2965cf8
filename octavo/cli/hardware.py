"""``octavo hardware list`` and ``octavo hardware show``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo.cli import Command, UsageError, terminal
from octavo.cli.calibrate import warn_if_busy
from octavo.cli.flags import add_json_flag, add_switch, add_value
from octavo.cli.parser import completed_by
from octavo.cli.plan_flags import device_names

if TYPE_CHECKING:
    from octavo.cost.hardware import Device

EXAMPLES = """\
examples:
  octavo hardware list
  octavo hardware show h200-sxm
  octavo hardware show "RTX 4090" --json
  octavo hardware show auto                     # this machine, measured
"""

LIST_EXAMPLES = """\
Peaks are dense, of 16 bits; "ridge" is how many operations for each byte it takes until they, and
not memory, are the bound. Links are a direction's. Prices were found in November 2026: see yours.

Your own devices are tables of the same fields in $OCTAVO_HOME/hardware.toml, or in --hardware-file:

  [[devices]]
  name = "My card"
  memory_gib = 47.5
  bandwidth_gb_s = 900
  dense_tflops = { fp16 = 120, int8 = 240 }

examples:
  octavo hardware list
  octavo hardware list --hardware-file lab.toml --json
"""

SHOW_EXAMPLES = """\
Case, spaces, hyphens, a trailing "gb" and the order of words in a name do not matter.

examples:
  octavo hardware show a100-sxm-80gb
  octavo hardware show epyc-genoa
  octavo hardware show "H100 SXM:8" --json
  octavo hardware show auto                     # this machine, measured
  octavo hardware show auto --measure           # measured anew, whatever is kept
"""

COMMANDS = {
    "list": Command("hardware", "configure_list", "all devices, the user's own first"),
    "show": Command("hardware", "configure_show", "what is known of one device, and from where"),
}


def configure_list(parser: argparse.ArgumentParser) -> None:
    parser.epilog = LIST_EXAMPLES
    _add_common(parser)
    parser.set_defaults(run=list_devices)


def configure_show(parser: argparse.ArgumentParser) -> None:
    parser.epilog = SHOW_EXAMPLES
    completed_by(
        device_names,
        parser.add_argument("name", metavar="NAME", help="a device, or auto for this machine"),
    )
    add_switch(
        parser,
        "--measure",
        "of auto: measure this machine anew, for a second in which nothing else should run, "
        "and keep that in place of what is kept",
    )
    _add_common(parser)
    parser.set_defaults(run=show)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "--hardware-file FILE", "devices of your own, in TOML or JSON")
    add_json_flag(parser)


def list_devices(args: argparse.Namespace) -> int:
    from octavo.cost.hardware_table import devices

    known = devices(args.hardware_file)
    if args.json:
        terminal.print_json({"devices": [device.as_json() for device in known]})
        return 0
    head = ("NAME", "MEMORY", "GB/S", "TFLOPS", "RIDGE", "LINK", "$/HOUR")
    terminal.print_table(head, [_row(device) for device in known])
    return 0


def show(args: argparse.Namespace) -> int:
    from octavo.cost.find_device import find_device

    if args.measure:
        _measure(args.name)
    device, count = find_device(args.name, args.hardware_file)
    if args.json:
        terminal.print_json({**device.as_json(), "count": count})
        return 0
    for name, value in _lines(device):
        print(f"{name:<12} {value}")
    if count > 1:
        print(f"{'count':<12} {count}")
    return 0


def _measure(name: str) -> None:
    """Keep what this machine reaches now."""
    from octavo.cost.find_device import AUTO
    from octavo.cost.this_machine import measured_anew

    if name.partition(":")[0].strip().lower() != AUTO:
        raise UsageError(f"--measure is of this machine, which is called {AUTO}, not of {name}")
    warn_if_busy()
    measured_anew()


def _row(device: Device) -> tuple[str, ...]:
    return (
        device.name,
        terminal.format_bytes(device.memory_bytes),
        f"{device.memory_bandwidth / 1e9:,.0f}",
        f"{device.peak('fp16') / 1e12:,.1f}",
        f"{device.ridge():.0f}",
        _link(device) or "-",
        _price(device) or "-",
    )


def _lines(device: Device) -> Iterator[tuple[str, str]]:
    """Yield the names and the values of all that is known of a device."""
    yield "name", device.name
    yield "kind", device.kind
    yield "memory", terminal.format_bytes(device.memory_bytes)
    yield "bandwidth", f"{device.memory_bandwidth / 1e9:,.1f} GB/s"
    for arithmetic, peak in device.peaks.items():
        yield arithmetic, f"{peak / 1e12:,.2f} T operations/s, dense"
    yield "ridge", f"{device.ridge():.0f} operations for each byte, of 16 bits"
    for name, text in (
        ("link", _link(device)),
        ("power", f"{device.tdp_watts:g} W" if device.tdp_watts else ""),
        ("$ an hour", _price(device)),
        ("trust", device.trust),
        ("source", device.source),
        ("note", device.note),
    ):
        if text:
            yield name, text


def _link(device: Device) -> str:
    if device.link_bandwidth is None:
        return ""
    return f"{device.link_bandwidth / 1e9:,.0f} GB/s {device.link_kind}".rstrip()


def _price(device: Device) -> str:
    if device.usd_per_hour is None:
        return ""
    low, high = device.usd_per_hour
    return f"{low:.2f}" if low == high else f"{low:.2f}-{high:.2f}"
