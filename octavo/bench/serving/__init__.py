"""Load on a server, over HTTP: `octavo bench serve`.

http_client -> http_stream -> endpoint    one request, and when each of its events came
load                                      many of them: open and closed loop -> RequestRecords
serve_config, serve                       settings, and the run; `octavo.measure` makes the report
"""
