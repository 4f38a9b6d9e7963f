"""torch's fast path of nn.TransformerEncoderLayer, kept off where it would read the weights of prepared layers.

In eval mode without gradients, torch runs an encoder layer as one C++ call that is handed the weights. The forwards
of `linear1` and `linear2` do not run then, so a prepared layer would compute float numbers. Its converted form would
not: its weight is a tensor subclass, which keeps torch on the ordinary path. torch asks the layer's
`activation_relu_or_gelu` before it takes the fast path (0 is "neither"), and the encoder's `use_nested_tensor` before
it packs padded batches for it. `sync` clears both where a prepared layer is beneath, and puts them back where none is
any more.
"""

from torch import nn

from aoquant.linear.prepared import QATLayer

_KEPT = "aoquant_fast_path"  # attribute with the value that was cleared
_SWITCHES = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}


def sync(model: nn.Module) -> None:
    """Clear the switches of every encoder and encoder layer in `model` that holds a prepared layer; restore those of
    the others.
    """
    for module in model.modules():
        switch = next((name for cls, name in _SWITCHES.items() if isinstance(module, cls)), None)
        if switch is None:
            continue
        attributes = vars(module)
        if any(isinstance(m, QATLayer) for m in module.modules()):
            if _KEPT not in attributes and switch in attributes:
                attributes[_KEPT] = attributes[switch]
                attributes[switch] = type(attributes[switch])(0)
        elif _KEPT in attributes:
            attributes[switch] = attributes.pop(_KEPT)
