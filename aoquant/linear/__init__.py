"""A linear layer, prepared and packed.

function.py       the page: the forward and backward of every recipe
recipe.py         the six operands, and the contract      law.py       which may meet, and what forward keeps
checks.py         of a call that is not ordinary          cache.py     what is not encoded twice
saved.py          what forward saves for backward         replay.py    steps again, without their Python
prepared.py       the class that prepare swaps in         held.py      its static and learned scales
packed.py         the class that convert swaps in         tensor.py    its weight      bound.py  bound to its kernels
embedding.py      rows of a weight                        mastered.py  layers that train beside codes alone
direct_reads.py   the warning for weights that are read past fake quantisation
"""
