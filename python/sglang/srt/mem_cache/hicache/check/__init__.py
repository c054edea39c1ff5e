"""Whether this installation and SGLang fit together."""
