"""Upkeep of a studio: the room that its data takes, the data that may go, backups, and its health."""
