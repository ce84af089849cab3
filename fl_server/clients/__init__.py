"""Clients as the coordinator deals with them: what they report of themselves and of their work, and how often."""
