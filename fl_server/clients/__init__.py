"""Which clients there are, and who of two that use one identity is served."""
