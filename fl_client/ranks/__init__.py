"""Several processes of one daemon that train together, as ranks of torch.distributed on this machine."""
