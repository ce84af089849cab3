"""Clients in lockstep: the local work of many clients at once, as one model with a leading client dimension.

Step k of all clients is one forward and one backward pass over tensors [clients, batch, ...] with parameters
[clients, ...], and the local rule is applied to these tensors. Every client has its own batches, random numbers,
buffers and state, so that its update is that of `algorithms.client.answer` up to the rounding of sums. Files, clocks,
processes and the choice of the clients that form a group do not belong here.
"""
