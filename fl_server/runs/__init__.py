"""One run's life: what is checked of the updates that make its models."""
