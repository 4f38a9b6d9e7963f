"""From a config to steps: which layer gets what, checked for the whole model before any layer changes."""
