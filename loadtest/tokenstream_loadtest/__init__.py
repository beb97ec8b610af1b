"""Load tests for token-streaming servers: workloads, arrivals, exact clocks, reports and comparisons.

It asks servers through `tokenstream` or over HTTP and measures what a caller sees; it does not know how they work.
"""
