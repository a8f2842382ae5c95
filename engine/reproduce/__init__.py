"""One file a paper: its examples and tables computed by our engine, beside the published numbers."""
