"""Server-sent events: a page's changes while it is open.

The id of an event is a number of the ledger's history. A browser that connects again sends the last one that it has,
and gets what came after it, each entry once. Values that are no entries are sent again as a whole, so a cut loses
nothing.
"""
