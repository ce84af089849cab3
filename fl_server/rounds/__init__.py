"""The rounds of a run as a state machine: events in, commands out; who takes part; when a round closes and a run ends.

Standard library only: no clock, store, network or tensor enters. `runs` drives it and carries out its commands.
"""
