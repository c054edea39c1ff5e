"""What SGLang's HiCache lacks on a machine without an accelerator: `support` installs it, `copy_ops` copies."""
