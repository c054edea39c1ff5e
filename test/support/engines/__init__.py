"""SGLang's engine and server on tiny models, each in a process of its own."""
