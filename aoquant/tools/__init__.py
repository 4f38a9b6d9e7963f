"""Questions about a machine or a layer: which recipes run here, which kernel serves a layer, a layer from packed
tensors.
"""
