"""The HTTP server. One process answers HTTP, a second one runs the engine:

    client ── http/connection ── http/gate ── api/… ─────┐ Generation        process "octavo serve"
              framing            who may      routes     │ (engine/generation)
                                                         │
                                            engine/client ── engine/supervisor: starts, watches
                                                  │          and replaces the other process
                                                  │ engine/wire: frames on a socket pair
                                            engine/worker    process "engine": one thread steps it

Importing anything here but ``worker`` loads no torch. ``docs/server.md`` describes it for users.
"""
