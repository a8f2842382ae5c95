"""Measured times in outside forms: logs, tables, traces."""
