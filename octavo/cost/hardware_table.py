"""Devices by name: the table that comes with octavo, and the user's own.

Names are forgiving: case, spaces, hyphens, the order of words, the maker and a trailing "gb" do not
matter, and neither does what a name leaves out, as long as one device is meant::

    named_device("h200-sxm")      named_device("rtx4090")      named_device("H100 SXM")

Own devices are tables of the same fields as in ``hardware.json``, in TOML or JSON::

    [[devices]]
    name = "My card"
    kind = "gpu"
    memory_gib = 47.5
    bandwidth_gb_s = 900
    dense_tflops = { fp16 = 120, int8 = 240 }

A processor may have ``cores``, ``ghz`` and ``operations_per_cycle`` of a core in place of peaks.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

from octavo.base.errors import ConfigError, ModelFileError
from octavo.base.fields import Fields
from octavo.cost.hardware import SHARED_MEMORY, Device, shared_memory_bandwidth
from octavo.cost.rank_model import Arithmetic

KINDS = ("gpu", "cpu", "unified")
TRUST = ("sure", "mostly", "uncertain")
_BUILT_IN = Path(__file__).with_name("hardware.json")
# Words of a name that say nothing about which device it is.
_NOISE = {"nvidia", "geforce", "tesla", "amd", "instinct", "intel", "apple", "aws", "gpu", "cpu",
          "per", "extra"}  # fmt: skip
_FIELDS = {"name", "kind", "memory_gib", "bandwidth_gb_s", "dense_tflops", "cores", "ghz",
           "operations_per_cycle", "link_gb_s", "link_kind", "tdp_watts", "usd_per_hour", "trust",
           "note", "source", "aliases"}  # fmt: skip


def devices(own: str | Path | None = None) -> tuple[Device, ...]:
    """All that can be named: those of ``own``, of ``$OCTAVO_HOME/hardware.toml``, and the table's;
    of one name, the first.

    ConfigError if a file cannot be read, or a device in it is not well described.
    """
    files = [Path(own)] if own is not None else []
    if (in_home := _home() / "hardware.toml").is_file():
        files.append(in_home)
    found: dict[tuple[str, ...], Device] = {}
    for device in (*(device for file in files for device in read_devices(file)), *_built_in()):
        found.setdefault(_atoms(device.name), device)
    return tuple(found.values())


def named_device(name: str, own: str | Path | None = None) -> Device:
    """The device that ``name`` means, of those in `devices`.

    ConfigError if it means no device, or more than one; the message has the nearest.
    """
    asked = _atoms(name)
    for refused, reason in _never_sold().items():
        if asked == _atoms(refused):
            raise ConfigError(f"hardware {name!r}: {reason}")
    known = devices(own)
    if not asked:
        raise ConfigError(f"hardware {name!r} names no device; {_SEE_LIST}")
    exact = [device for device in known if asked in _names(device)]
    matches = exact or [device for device in known if _within(asked, device)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(device.name for device in matches)
        raise ConfigError(f"hardware {name!r} may be any of: {names}")
    raise ConfigError(f"there is no hardware {name!r} in the table{_nearest(name, known)}")


def read_devices(path: Path) -> tuple[Device, ...]:
    """Own devices of a TOML or JSON file. ConfigError if it is not as it should be."""
    try:
        document = _parse(path, path.read_text(encoding="utf-8"))
        return tuple(map(_device, Fields(path, document).each("devices", Fields.section)))
    except OSError as error:
        raise ConfigError(f"cannot read hardware from {path}: {error.strerror}") from error
    except ModelFileError as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:
        raise ConfigError(f"{path} is neither TOML nor JSON as it should be: {error}") from error


# -- names ----------------------------------------------------------------------------------------

_SEE_LIST = "`octavo hardware list` shows all"


# A letter and a number are one word, with a letter that follows: an A10G is no A10, nor an A40 one
# of the A100 that have 40 GB. Else runs of letters and of digits are words.
_WORDS = re.compile(r"(?<![a-z0-9])[a-z][ _-]?\d+(?:[a-z](?![a-z]))?|[a-z]+|\d+")
_UNITS = ("g", "gb", "gib")


def _atoms(name: str) -> tuple[str, ...]:
    """Words of a name, without those that say nothing, in alphabetical order."""
    words = [re.sub("[ _-]", "", word) for word in _WORDS.findall(name.lower())]
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word not in _NOISE and not (word in _UNITS and before.isdecimal())
    ]
    return tuple(sorted(kept))


def _names(device: Device) -> set[tuple[str, ...]]:
    return {_atoms(name) for name in (device.name, *device.aliases)}


def _within(asked: tuple[str, ...], device: Device) -> bool:
    """Whether some name of a device has all that was asked for."""
    return any(
        all(name.count(atom) >= asked.count(atom) for atom in asked) for name in _names(device)
    )


def _nearest(name: str, known: tuple[Device, ...]) -> str:
    plain = {" ".join(_atoms(device.name)): device.name for device in known}
    near = difflib.get_close_matches(" ".join(_atoms(name)), plain, n=3, cutoff=0.5)
    if not near:
        return f"; {_SEE_LIST}"
    return f"; the nearest: {', '.join(plain[key] for key in near)} ({_SEE_LIST})"


# -- files ----------------------------------------------------------------------------------------


def _home() -> Path:
    from octavo.hub.store import home  # only for who asks: it takes a while to import

    return home()


def _parse(path: Path, text: str) -> dict[str, Any]:
    """ValueError, of which both parsers' errors are, if it is not well formed."""
    if path.suffix == ".json":
        document = json.loads(text)
    else:
        import tomllib

        document = tomllib.loads(text)
    if not isinstance(document, dict):
        raise ValueError("a table with the key 'devices' is needed")
    return document


@cache
def _built_in() -> tuple[Device, ...]:
    return read_devices(_BUILT_IN)


@cache
def _never_sold() -> dict[str, str]:
    never: dict[str, str] = json.loads(_BUILT_IN.read_text(encoding="utf-8"))["never_sold"]
    return never


def _device(fields: Fields) -> Device:
    for key in fields:
        if key not in _FIELDS:
            raise fields.error(key, f"is not known; there are {', '.join(sorted(_FIELDS))}")
    kind = _one_of(fields, "kind", KINDS, "gpu")
    is_cpu = kind == "cpu"
    return Device(
        name=fields.text("name"),
        kind=kind,
        memory_bytes=fields.number("memory_gib") * 2**30,
        memory_bandwidth=fields.number("bandwidth_gb_s") * 1e9,
        peaks=_peaks(fields),
        link_bandwidth=_link_bandwidth(fields, is_cpu=is_cpu),
        link_kind=fields.text("link_kind", SHARED_MEMORY if is_cpu else ""),
        tdp_watts=fields.number("tdp_watts", None),
        usd_per_hour=_prices(fields),
        trust=_one_of(fields, "trust", TRUST, "uncertain"),
        note=fields.text("note", ""),
        source=fields.text("source", str(fields.path)),
        aliases=tuple(fields.texts("aliases")) if "aliases" in fields else (),
        num_cores=fields.integer("cores", None) if is_cpu else None,
    )


def _link_bandwidth(fields: Fields, *, is_cpu: bool) -> float | None:
    if is_cpu and "link_gb_s" not in fields:
        memory, cores = fields.number("bandwidth_gb_s") * 1e9, fields.integer("cores", None)
        return shared_memory_bandwidth(memory, cores, is_between_sockets=True)
    link: float | None = fields.number("link_gb_s", None)
    return link and link * 1e9


def _one_of(fields: Fields, name: str, choices: tuple[str, ...], default: str) -> str:
    value: str = fields.text(name, default)
    if value not in choices:
        raise fields.error(name, f"{value!r} is none of {', '.join(choices)}")
    return value


def _peaks(fields: Fields) -> dict[Arithmetic, float]:
    """Operations a second: given, or of cores, their clock, and what each does in a cycle."""
    if "dense_tflops" in fields:
        return _by_arithmetic(fields, "dense_tflops", 1e12)
    cycles = fields.integer("cores") * fields.number("ghz") * 1e9
    return _by_arithmetic(fields, "operations_per_cycle", cycles)


def _by_arithmetic(fields: Fields, name: str, unit: float) -> dict[Arithmetic, float]:
    section = fields.section(name)
    known: tuple[Arithmetic, ...] = get_args(Arithmetic)
    for key in section:
        if key not in known:
            raise section.error(key, f"is not computed in; there are {', '.join(known)}")
    peaks = {key: section.number(key) * unit for key in known if key in section}
    if not peaks:
        raise fields.error(name, "needs at least one peak, such as fp16")
    return peaks


def _prices(fields: Fields) -> tuple[float, float] | None:
    if "usd_per_hour" not in fields:
        return None
    low, high = fields.each("usd_per_hour", Fields.number, 2)
    if low > high:
        raise fields.error("usd_per_hour", f"is from ... to, and {low} is more than {high}")
    return low, high
