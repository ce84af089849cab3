"""The daemon on a device: registers with a coordinator, trains on the device's own data, and returns updates.

Packages import downwards: setup, app and daemon; assignments; training; connection and storage; gates and monitoring;
settings; and errors. The daemon never imports fl_server or fl_ops.
"""
