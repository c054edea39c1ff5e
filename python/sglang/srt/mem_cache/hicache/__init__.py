"""HiCache on layout strategies: the only code of this distribution that touches SGLang."""
