"""Edges to other libraries. Each module is optional: users import it by name, and no module of a lower tier does."""
