"""The way into an SGLang server: flags, hooks, refusals, metrics."""
