"""One run's life, and what a coordinator keeps of all its runs."""
