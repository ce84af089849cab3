"""The owner's conditions for training: time windows, power supply, temperature, and other users of the GPU.

One module for each gate, and the set of all gates. A gate reads a sensor or the clock, and changes nothing. It knows
nothing of the coordinator and of assignments.
"""
