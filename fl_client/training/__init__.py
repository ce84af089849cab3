"""The work on the device: load task and data, train or evaluate, and make the update of one assignment.

It uses torch, algorithms and fl_tasks. It knows no sessions and no retries: bundles come in, updates go out.
"""
