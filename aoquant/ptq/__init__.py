"""Calibrated post-training quantisation: codes that are chosen for a layer's output on calibration data.

Read in this order: `calibrate_config.py` (what a user asks), `sequential.py` (the plan and its steps), `blocks.py` (the
inputs that a layer has behind quantised layers), `gram.py` (what is kept of them), `gptq.py` (how codes are chosen).
Before codes are chosen, `fold.py` scales channels and `rotate.py` rotates the float model, where `links.py` shows how.
"""
