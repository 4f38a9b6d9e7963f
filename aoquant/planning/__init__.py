"""From a config to a plan: which layer gets what, checked for the whole model before any layer changes."""
