"""Experiments: many recipes fine-tuned on one budget and scored alike. `python eval/experiments --help` says how."""
