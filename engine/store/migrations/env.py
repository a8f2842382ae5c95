"""Run by Alembic for every upgrade, on the connection that `engine.store.database` has opened."""

from alembic import context

from engine.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
