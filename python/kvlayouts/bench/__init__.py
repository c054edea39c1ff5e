"""`kvlayouts bench`: this package's tree, plans and orders beside SGLang's own, in one run."""
