"""Studies: how far a plan can be trusted, answered by making many plans from parts of recordings and scoring each on others."""
