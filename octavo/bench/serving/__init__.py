"""Load on a server, over HTTP: `octavo bench serve`.

http_client -> http_stream -> endpoint    one request, and when each of its events came
load                                      many of them: open and closed loop -> request_record
metrics, slo, concurrency, saturation     what the timestamps say -> load_report
serve_config, serve, serve_report         flags, the run, and its result in vLLM's words
"""
