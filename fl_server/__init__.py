"""The coordinator: samples clients, collects their updates, applies the server algorithm, commits rounds."""
