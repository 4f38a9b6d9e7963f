"""KV caches: keys and values fake-quantised in training as engines store them, and packed caches after convert.

`config.py` says which format a cache gets, `hook.py` puts it between an attention module and its cache.
"""

from aoquant.kv.cache_config import KVCacheConfig, as_kv_config

__all__ = ["KVCacheConfig", "as_kv_config"]
