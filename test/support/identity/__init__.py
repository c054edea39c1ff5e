"""SGLang's own cache beside ours with the layout `identity`."""
