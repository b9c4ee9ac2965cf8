"""Metrics of a run from the timestamps of its requests, whether a server or a simulator answered.

request_record -> request_log             one request; a file of them
metrics, slo, concurrency, saturation     figures of all records -> load_report
serve_report                              the report in the form of `vllm bench serve`
statistics, knee, results                 intervals, curves; result files

Nothing here reads a clock or knows what was measured.
"""
