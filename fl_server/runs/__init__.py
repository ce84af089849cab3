"""One run's life: its loading and extension, what is checked of its updates, and what operators did with it."""
