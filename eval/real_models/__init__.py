"""Public pretrained models: float, PTQ and QAT of many recipes on one budget. `python eval/real_models --help`."""
