"""The device's own audit log: what its daemon was asked to do, and what it did, in a file of the state directory.

The rows and their chain are those of the coordinator's log (`fl_common.audit`). The coordinator never reads this file.
"""
