"""One run's life: its loading and extension, the checks of its updates, its client states, and its audit rows."""
