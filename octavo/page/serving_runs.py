"""What a server makes of the same requests at rates from little to too much, in virtual time: what
the page's simulator shows.

Rates are told as shares of what one replica of this model on this hardware answers with the usual
settings, if it is never without work, so that they mean the same for all models. One JSON::

    {made: {version, date}, settings, usual_rate, runs: [{share, rate, num_requests, series,
     requests, prefix_hit_rate, num_preemptions}]}

``series`` is ``[[seconds, running, waiting, share of the KV pool], ...]``, ``requests`` are ``[time
to first token, time per token after it or null]`` in seconds, of the second half of those that were
sent: when the first of them came, the server was still filling.

``python -m octavo.page.serving_runs`` reads a question from its input and writes that; a server has
it run so, where it takes the interpreter of nobody. A question is settings, and beside them what
the names of the catalogue do not tell: ``config``, the contents of a model's ``config.json``, or
``path``, where its files are; and ``device``, the kind of what is here, for the hardware "auto".
``--record`` writes the file of some runs that come with octavo, for pages that have no server.
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
    """What serves; the first of ``CHOICES`` are the usual settings, and those that are recorded.

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
        """The same model on the same hardware, with one replica and the usual settings."""
        return replace(self, **{name: choices[0] for name, choices in CHOICES.items()})


def serving_runs(
    settings: ServingSettings, shares: Sequence[float] = SHARES, spec: ModelSpec | None = None
) -> dict[str, Any]:
    """Runs at all rates; some seconds of one processor.

    Args:
        spec: the model's shape, if ``settings.model`` is not its name in the catalogue.

    Raises:
        ConfigError: the model does not fit the hardware, or nobody knows it.
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
    """The usual ones, and those that differ from them in one thing."""
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
    if name not in names():  # no file is read because somebody names it
        raise ConfigError(f"{name!r} is no model of the catalogue")
    return spec_of(name)


def _rate_without_pause(spec: ModelSpec, settings: ServingSettings) -> float:
    """Answers a second while none of many requests has yet to come: of the middle half, as batches
    are not full at the end."""
    result = _simulation(spec, settings, math.inf, _WORKLOAD).run().result
    _check_answered(result.records, spec)
    ends = sorted(record.ended for record in result.records)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first])


def _check_answered(records: Sequence[RequestRecord], spec: ModelSpec) -> None:
    """ConfigError if the context of a model is too short for the load that is shown."""
    refused = sum(not record.completed for record in records)
    if refused:
        raise ConfigError(
            f"a context of {spec.max_position} tokens is too short for {refused} of the "
            f"{len(records)} requests, of 512 tokens that all share, about 512 of their own, and "
            "about 128 of an answer"
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
    """The runs, or ``{error, status}`` where the question makes no sense."""
    try:
        asked = ServingSettings(**settings)
        if asked.hardware == AUTO:
            device_of_engine(device)  # or nothing is known of it: it is not measured for this
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
