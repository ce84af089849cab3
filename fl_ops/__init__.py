"""The operator's command `fl`: runs, clients, models, certificates."""
