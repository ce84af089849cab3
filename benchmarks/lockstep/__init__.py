"""Clients in lockstep beside clients one after the other: time of the local work alone.

Models, data and the measurement may enter. Rounds, admission and networks do not belong here.
"""
