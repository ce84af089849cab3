"""Parts of one run's life that are not rounds: client states that are lost or missing."""
