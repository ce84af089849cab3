"""Clients as the coordinator deals with them: what they report, what each may cost, and which of two is served."""
