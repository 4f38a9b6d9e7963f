"""A linear layer, prepared and packed.

function.py       the page: the forward and backward of every recipe
recipe.py         the six operands, and the contract      law.py       which may meet, and what forward keeps
checks.py         of a call that is not ordinary          cache.py     what is not encoded twice
saved.py          what forward saves for backward         replay.py    steps again, without their Python
prepared.py       the class that prepare swaps in         held.py      its static and learned scales
packed.py         the class that convert swaps in         tensor.py    its weight      bound.py  bound to its kernels
embedding.py      rows of a weight                        mastered.py  layers that train beside codes alone
weight_codes.py   codes in a weight's place               fixed_weights.py   several calls with one set of weights
kinds.py          layers that can be quantised            switches.py  fake quantisation off and on
replaced.py       prepared modules that are gone          learned_scales.py   scales as an optimizer meets them
packed_moves.py   views, copies and cuts of a packed tensor
packed_parts.py   the check that its parts fit its format
sharded_packed.py a converted layer whose weight is sharded
siblings.py       q, k and v in one launch, in compiled code
direct_reads.py   the warning for weights that are read past fake quantisation
fast_path.py      torch's fast path, kept off where it would read such weights
"""
