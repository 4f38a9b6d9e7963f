"""Edges to other libraries. Each module is optional: whoever needs it imports it, and nothing on a lower floor does."""
