"""How good a plan is: its figures and standing, studies of what would change it, and a verdict on whether it is worth it."""
