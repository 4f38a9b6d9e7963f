"""The prepared layers: what a recipe is, the one autograd function, and the modules that prepare swaps in."""
