"""The HTTP server. One process answers HTTP, a second one runs the engine:

    client ── http/connection ── http/access_control ── api/… ─┐ Generation  process "octavo serve"
              framing            keys, limits           routes │ (engine/generation)
                                                         │
                                            engine/client ── engine/supervisor: starts, watches
                                                  │          and replaces the other process
                                                  │ engine/wire: frames on a socket pair
                                            engine/worker    process "engine": one thread steps it

Importing anything here loads no torch; the engine's process does where a model or a request needs
it. ``docs/server.md`` describes the server for users.
"""
