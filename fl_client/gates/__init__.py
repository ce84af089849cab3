"""The owner's conditions for training: time windows, power supply, temperature, and other users of the GPU.

A gate reads a sensor or the clock, and changes nothing. It knows nothing of the coordinator and of assignments. The
monitor reports to the coordinator whether the device may train, also while its state directory cannot be used.
"""
