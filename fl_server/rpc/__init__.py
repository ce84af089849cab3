"""What the coordinator knows of a call beside its message: the connection, its certificate, its limits."""
