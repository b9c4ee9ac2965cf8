from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from octavo import __version__
from octavo.core.stats import StepStats
from octavo.server.api.octavo.operation import create_router
from octavo.server.engine.generation import EngineState


@pytest.fixture
def service(fake_engine, create_service):
    return create_service(fake_engine)


@pytest.fixture
def ask(service, send):
    """Sends one request to the routes of ``service``, as the given tenant."""

    def ask(method, path, *, tenant=None, served=service, **kwargs):
        return send(create_router(served), method, path, tenant=tenant, **kwargs)

    return ask


ROUTES = ["/health", "/ready", "/ping", "/version", "/load"]


@pytest.mark.parametrize("path", ROUTES)
def test_every_operational_route_answers_get_and_head(ask, path):
    response = ask("GET", path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert ask("HEAD", path).status_code == 200
    response = ask("DELETE", path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize("state", list(EngineState))
def test_health_is_the_engines(ask, fake_engine, state):
    fake_engine.state = state
    is_ready = state is EngineState.READY
    for path in ("/health", "/ready", "/ping"):
        response = ask("GET", path)
        assert response.status_code == (200 if is_ready else 503)
        assert response.json() == {"status": "ok" if is_ready else state.value}
    assert ask("GET", "/version").status_code == ask("GET", "/load").status_code == 200


def test_a_draining_server_is_alive_and_not_ready(ask, service):
    service.drain_state.is_draining = True
    assert ask("GET", "/health").status_code == 200
    response = ask("GET", "/ready")
    assert (response.status_code, response.json()) == (503, {"status": "draining"})


def test_version(ask):
    assert ask("GET", "/version").json() == {"version": __version__}


def test_load_has_vllms_number_and_the_engines(ask, fake_engine):
    fake_engine.num_restarts = 7
    fake_engine.stats = replace(
        StepStats.idle(6), num_running=3, num_waiting=2, num_used_blocks=2, num_preemptions=9
    )
    load = ask("GET", "/load").json()
    assert load["server_load"] == 5
    assert (load["num_running"], load["num_waiting"], load["kv_usage"]) == (3, 2, 0.25)
    assert load["num_restarts"] == 7
    for name, figure in asdict(fake_engine.stats).items():
        assert load[name] == (list(figure) if isinstance(figure, tuple) else figure)


def test_openapi_describes_the_load(ask, service, create_test_app):
    document = create_test_app(create_router(service)).openapi()
    load = document["components"]["schemas"]["Load"]
    assert set(load["properties"]) == set(ask("GET", "/load").json())
    for path in ROUTES:
        assert set(document["paths"][path]) == {"get"}
