"""`kvlayouts replay --report`: the results as one self-contained HTML page, which loads nothing and runs no script."""
