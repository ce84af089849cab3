"""Several processes of one daemon that train together, as ranks of torch.distributed on this machine.

It has their start, their watch and the work that they are given. How they train is in `fl_client.training`.
"""
