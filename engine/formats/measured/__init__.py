"""Measured times in the forms in which others have them: logs, tables, traces."""
