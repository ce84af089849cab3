"""The daemon on a device: registers with a coordinator, trains on the device's own shard, and sends updates back."""
