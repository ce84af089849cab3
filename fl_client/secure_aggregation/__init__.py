"""This device's part in secure aggregation: what it has answered, durable before it leaves, and the answers.

`fl_common.secure_aggregation` has the protocol.
"""
