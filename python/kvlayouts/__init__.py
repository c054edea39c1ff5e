"""The command line `kvlayouts`. Importing it loads neither PyTorch nor a pool."""
