"""The views: what each page reads from the coordinator, and which of its parts change while it is open.

A view is the same with and without JavaScript: one function makes the values of its templates, for the whole page and
for the parts that are sent while it is open. Nothing here changes anything at the coordinator.
"""
