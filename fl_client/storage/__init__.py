"""What the state directory may hold."""
