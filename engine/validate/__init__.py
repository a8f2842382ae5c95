"""Refuses broken plans, wherever one is read, opened, launched or exported."""

from engine.validate.refusal import refuse_broken, refuse_broken_launch
