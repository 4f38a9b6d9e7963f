"""Layers whose weight several devices hold: tensor parallelism, FSDP2, and the packed form of both."""
