"""Judgement of plans: figures and standing, studies of possible changes, and a verdict on recordings held out."""
