"""The HTTP server. One process answers HTTP, a second one runs the engine:

    client ── http.py ── gate.py ── app.py ── chat.py ──┐ Generation         process "octavo serve"
              framing    who may    routes    OpenAI    │ (generation.py)
                                              semantics │
                                     engine_client.py ──┘ supervises
                                            │ wire.py: frames on a socket pair
                                     worker.py            process "engine": one thread steps it

Importing anything here but ``worker`` loads no torch. ``docs/server.md`` describes it for users.
"""
