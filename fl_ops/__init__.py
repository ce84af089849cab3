"""The operator's command `fl`: runs, clients, models, certificates, simulation and comparison.

It may import every other package; no other package imports it. Inside, imports go from `commands` down to `demo` and
`compare`, then `simulate`, then `render`, `admin` and `certificates`, then `files`, `environment` and `errors`.
"""
