"""Simulated runs of a server at rates from little to too much load, for the page's simulator.

Rates are shares of what one replica of this model on this hardware answers with the default
settings, if it is never without work, so that they mean the same for all models. One JSON::

    {made: {version, date}, settings, usual_rate, runs: [{share, rate, num_requests, series,
     requests, prefix_hit_rate, num_preemptions}]}

``series`` is ``[[seconds, running, waiting, share of the KV pool], ...]``, ``requests`` are ``[time
to first token, time per token after it or null]`` in seconds, of the second half of the requests
that were sent: when the first half came, the server was still filling.

``python -m octavo.page.serving_runs`` reads a question from its input and writes that; a server
runs it as a process of its own. A question is settings, and beside them, for models that are not in
the catalogue, ``config``, the contents of a model's ``config.json``, or ``path``, where its files
are; and ``device``, the kind of this machine's device, for the hardware "auto". ``--record`` writes
the file of the runs that come with octavo, for pages without a server.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import octavo
from octavo.base.errors import ConfigError, ModelError
from octavo.base.files import replace_file
from octavo.cost.catalogue import names, spec_of
from octavo.cost.find_device import AUTO
from octavo.cost.hardware_table import devices
from octavo.cost.model_spec import ModelSpec
from octavo.cost.open_spec import open_spec
from octavo.cost.spec_hf import spec_from_hf
from octavo.cost.this_machine import device_of_engine
from octavo.measure.request_record import RequestRecord
from octavo.sim import FleetSettings, LoadSettings, Simulation, Timeline, Workload, prepare

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "batching": ("continuous", "static"),
    "prefix_caching": (True, False),
    "step_tokens": (2048, 512, 8192),
    "max_num_seqs": (32, 8, 128),
    "replicas": (1, 2, 4),
}
BOUNDS = {  # of the numbers among them
    "step_tokens": (64, 32768),
    "max_num_seqs": (1, 512),
    "replicas": (1, 4),  # as many as rates go to times what one answers with
}
RECORDED = Path(__file__).with_name("static") / "recorded" / "serving.json"

_LEAST_REQUESTS = 100  # of a run; where rates are high, as many as come in the same time,
_REQUESTS = 160  # which is so many at the usual rate
_WORKLOAD = Workload(
    num_prompts=_REQUESTS,
    random_prefix_len=512,  # that all prompts begin with
    random_input_len=512,
    random_output_len=128,
    random_length_cv=0.5,
)
_MAX_POINTS = 40  # of a series
_DIGITS = 3  # of all figures


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """Settings of a simulated server. The first of ``CHOICES`` are the defaults.

    ``hardware`` is a device by its name, or "auto", the machine that this runs on.

    Raises:
        ConfigError: a device that is not known by its name, or a setting out of its bounds.
    """

    model: str = "llama-3.1-8b"
    hardware: str = "H100 SXM"
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    batching: str = "continuous"
    prefix_caching: bool = True
    step_tokens: int = 2048
    max_num_seqs: int = 32
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.hardware not in {AUTO, *(device.name for device in devices())}:
            raise ConfigError(f"{self.hardware!r} is no device that is known")
        if self.batching not in CHOICES["batching"]:
            raise ConfigError(f"batching is one of {CHOICES['batching']}, not {self.batching!r}")
        for name, (least, most) in BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is from {least} to {most}, not {getattr(self, name)!r}")

    @property
    def usual(self) -> ServingSettings:
        """The same model on the same hardware, with one replica and the default settings."""
        return replace(self, **{name: choices[0] for name, choices in CHOICES.items()})


def serving_runs(
    settings: ServingSettings, shares: Sequence[float] = SHARES, spec: ModelSpec | None = None
) -> dict[str, Any]:
    """Return runs at all rates; takes some seconds of one processor.

    Args:
        spec: the model's shape, if ``settings.model`` is not its name in the catalogue.

    Raises:
        ConfigError: the model does not fit the hardware, or is not known.
    """
    spec = spec or _known_spec(settings.model)
    usual_rate = _rounded(_rate_without_pause(spec, settings.usual))
    return {
        "made": {"version": octavo.__version__, "date": date.today().isoformat()},
        "settings": asdict(settings),
        "usual_rate": usual_rate,
        "runs": [_run(spec, settings, usual_rate, share) for share in shares],
    }


def recorded_settings() -> list[ServingSettings]:
    """Return the default settings, and all that differ from them in one setting."""
    usual = ServingSettings()
    others = [
        replace(usual, **{name: choice})
        for name, choices in CHOICES.items()
        for choice in choices[1:]
    ]
    return [usual, *others]


def record() -> None:
    """Write the file of recorded runs anew."""
    runs = [serving_runs(settings) for settings in recorded_settings()]
    replace_file(RECORDED, _text(runs).encode())


def _known_spec(name: str) -> ModelSpec:
    if name not in names():  # a name must not make this read a file
        raise ConfigError(f"{name!r} is no model of the catalogue")
    return spec_of(name)


def _rate_without_pause(spec: ModelSpec, settings: ServingSettings) -> float:
    """Return answers per second when all requests are there from the start.

    It is that of the middle half of the answers, as batches are not full at the end.
    """
    result = _simulation(spec, settings, math.inf, _WORKLOAD).run().result
    _check_answered(result.records, spec)
    ends = sorted(record.ended for record in result.records)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first])


def _check_answered(records: Sequence[RequestRecord], spec: ModelSpec) -> None:
    """Raise ConfigError if the context of a model is too short for the load of the runs."""
    refused = sum(not record.completed for record in records)
    if refused:
        raise ConfigError(
            f"a context of {spec.max_position} tokens is too short for {refused} of the "
            f"{len(records)} requests, which have 512 tokens that all share, about 512 of their "
            "own, and answers of about 128"
        )


def _simulation(
    spec: ModelSpec, settings: ServingSettings, rate: float, workload: Workload
) -> Simulation:
    fleet = FleetSettings(
        hardware=settings.hardware,
        tp=1,
        dtype=settings.dtype,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        replicas=settings.replicas,
    )
    engine = {
        "batching": settings.batching,
        "enable_prefix_caching": settings.prefix_caching,
        "max_num_batched_tokens": settings.step_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": "auto",
    }
    load = LoadSettings(request_rate=rate)
    return prepare(spec, fleet, workload, load, engine=engine)


def _run(
    spec: ModelSpec, settings: ServingSettings, usual_rate: float, share: float
) -> dict[str, Any]:
    rate = share * usual_rate
    num_requests = max(_LEAST_REQUESTS, round(share * _REQUESTS))
    timeline = Timeline()
    simulation = _simulation(spec, settings, rate, replace(_WORKLOAD, num_prompts=num_requests))
    result = simulation.run(watch=timeline.note).result
    _check_answered(result.records, spec)
    series = timeline.series(result.makespan_s, max_points=_MAX_POINTS)
    queried = sum(each.prefix_tokens_queried for each in result.replicas)
    hit = sum(each.prefix_tokens_hit for each in result.replicas)
    return {
        "share": share,
        "rate": _rounded(rate),
        "num_requests": num_requests,
        "series": [
            [_rounded(each) for each in (point.time_s, point.running, point.waiting, point.kv_use)]
            for point in series
        ],
        "requests": [_times(record) for record in result.records[num_requests // 2 :]],
        "prefix_hit_rate": _rounded(hit / queried) if queried else None,
        "num_preemptions": result.num_preemptions,
    }


def _times(record: RequestRecord) -> list[float | None]:
    return [_rounded(record.ttft), None if record.tpot is None else _rounded(record.tpot)]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _text(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _answer(
    config: Mapping[str, Any] | None = None,
    path: str | None = None,
    device: str = "cpu",
    **settings: Any,
) -> dict[str, Any]:
    """Return the runs, or ``{error, status}`` for a wrong question."""
    try:
        asked = ServingSettings(**settings)
        if asked.hardware == AUTO:
            device_of_engine(device)  # raises if nothing is known of it; it is not measured here
        spec = None
        if config is not None:
            spec = spec_from_hf(config, path=asked.model)
        elif path is not None:
            spec = open_spec(path)
        return serving_runs(asked, spec=spec)
    except (ConfigError, ModelError) as error:
        text = str(error) if path is None else str(error).replace(path, settings["model"])
        return {"error": text, "status": 400}


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        record()
    else:
        sys.stdout.write(_text(_answer(**json.load(sys.stdin))))
