"""Mixtures of experts: the stacked experts of a model, prepared, packed, and shared out over ranks.

families.py         which modules hold stacked experts, and in which order
grouped_linear.py   the product of sorted rows and their experts: one autograd function, or a loop of dense layers
prepared.py         the class that prepare gives a module of experts
stack.py            a prepared parameter, as the forward of a class of its own reads it
packed_experts.py   the tensor that convert puts in a parameter's place
mastered_experts.py prepared experts whose codes follow float32 masters
sharded.py          experts that ranks share out
routers.py          the modules that give each token its experts
"""
