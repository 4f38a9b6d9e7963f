"""The classes of aoquant that a checkpoint's config may name: configs and what they hold, and nothing else.

torchao looks a config's `_type` up in modules of an allow-list and calls what it finds, so the module that aoquant adds
to that list has no functions, no modules and no other classes.
"""

from aoquant.config import FP8WeightConfig as FP8WeightConfig
from aoquant.config import GridFlipFP4WeightConfig as GridFlipFP4WeightConfig
from aoquant.config import Int4WeightConfig as Int4WeightConfig
from aoquant.config import Int8WeightConfig as Int8WeightConfig
from aoquant.config import IntxWeightConfig as IntxWeightConfig
from aoquant.config import MXFP4WeightConfig as MXFP4WeightConfig
from aoquant.config import MXFP8WeightConfig as MXFP8WeightConfig
from aoquant.config import NVFP4WeightConfig as NVFP4WeightConfig
from aoquant.config import Packed4WeightConfig as Packed4WeightConfig
from aoquant.config import PackedWeightConfig as PackedWeightConfig
from aoquant.hybrid import Cast as Cast
from aoquant.hybrid import HybridConfig as HybridConfig
from aoquant.transforms import WUSH as WUSH
from aoquant.transforms import Hadamard as Hadamard
