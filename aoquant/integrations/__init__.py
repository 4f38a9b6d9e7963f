"""Edges to other libraries, each optional: a module here is imported by whoever needs it, and by nothing on a lower floor."""
