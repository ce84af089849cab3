"""The coordinator. `app` builds its parts from the settings and runs them; nothing else connects the packages.

Imports go down: rpc, uploads and runs use clients, metrics, aggregation and store; all use rounds, config and errors.
"""
