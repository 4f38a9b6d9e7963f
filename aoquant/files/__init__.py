"""Checkpoints on disk.

safetensors_file.py   headers and values, read in pieces and written in place
checkpoint.py         a folder: its files, its index, its names
stored_names.py       the names that a module's tensors have there
checksums.py          what tells damage
atomic.py             a folder appears whole or not at all
"""
