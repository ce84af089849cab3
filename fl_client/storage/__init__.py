"""The state directory: identity, shard, pending updates and client states, safe against crashes and power cuts.

All functions block. The daemon calls them on the one thread of `disk.DiskThread`. No networking and no training here.
"""
