"""`kvlayouts explain`: a picture of what a layout strategy does with one node, from the strategy's own plans."""
