"""KV caches: keys and values fake-quantised in training as engines store them, and packed caches after convert.

cache_config.py   which format a cache gets
hook.py           the place between an attention module and its cache
packed.py         caches of bytes
"""

from aoquant.kv.cache_config import KVCacheConfig, as_kv_config

__all__ = ["KVCacheConfig", "as_kv_config"]
