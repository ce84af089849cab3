"""The operator's command `fl`: runs, clients, models, certificates, simulation and comparison; and a reading API.

For a notebook: `import fl_ops as impetus`, then `impetus.connect(...)`; docs/operation/notebook.md has the rest. The
names below import what they need when they are used, so that the import costs next to nothing.

It may import every other package; no other package imports it. Inside, imports go from `commands` down to `demo` and
`compare`, then `simulate`, then `render`, `admin` and `certificates`, then `files`, `environment` and `errors`.
"""

from fl_ops.notebook import Coordinator, Run, connect

__all__ = ["Coordinator", "Run", "connect"]
