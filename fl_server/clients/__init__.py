"""Clients as the coordinator deals with them: what they report, what each may cost, and how often it may call."""
