"""`kvlayouts replay`: a request trace through real trees, controllers and pools, one process per rank."""
