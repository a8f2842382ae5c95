"""One file a paper: its examples and tables computed by our engine, with the published numbers."""
