"""The systems that plan a training step."""
