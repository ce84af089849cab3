"""What one client may cost: limits on its calls, streams, bytes and files."""
