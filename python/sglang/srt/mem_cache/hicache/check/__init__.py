"""Whether this installation and SGLang fit together, and whether a cache is what it must be."""
