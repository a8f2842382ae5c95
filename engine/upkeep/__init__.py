"""What keeps a studio in service: how much room its data takes, what of it may go, backups, and whether it is well."""
