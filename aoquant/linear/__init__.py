"""The prepared layers: the recipe, the one autograd function, and the modules that prepare swaps in."""
