"""Conditions under which a device may train: one small file for each, and the panel that holds them together."""
