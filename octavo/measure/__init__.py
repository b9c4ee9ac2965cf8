"""What a run says, from the timestamps of its requests, whether a server or a simulator answered.

request_record -> request_log             one request; a file of them
metrics, slo, concurrency, saturation     what the records say -> load_report
serve_report                              the report in the words of `vllm bench serve`
statistics, knee, results                 intervals, curves; result files

Nothing here reads a clock or knows who was measured.
"""
