"""Alembic's entry: runs the versions on the connection and in the transaction that the store hands over."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    render_as_batch=True,  # SQLite can change a column only by making the table anew
)
with context.begin_transaction():
    context.run_migrations()
