class ServerArgs:
    radix_cache_backend: str | None
