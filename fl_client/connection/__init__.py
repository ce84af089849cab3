"""What stands between the daemon and its coordinator: pace, and the reading of what comes down."""
