"""Alembic's entry: runs the versions on the connection and in the transaction that the store hands over."""

from alembic import context

import fl_server.store.database.security.schema  # noqa: F401 - adds its tables to the metadata
from fl_server.store.database.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite can change a column only by making the table anew
)
with context.begin_transaction():
    context.run_migrations()
