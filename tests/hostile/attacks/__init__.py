"""Hostile programs: each module has one function `attack(target, until)`."""
