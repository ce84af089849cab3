"""Calls for people who look at a coordinator: its history, its clients in any order, and an overview.

They answer from memory where they can, because a page calls them again and again.
"""
