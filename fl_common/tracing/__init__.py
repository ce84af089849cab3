"""Spans of rounds and calls: the interface, OpenTelemetry behind it, and the function that opens them.

Only `otel` imports OpenTelemetry. No other package of ours may be imported here, except settings for their errors.
"""
