"""Affinity against balance: one placement for both aims, and the front of all."""
