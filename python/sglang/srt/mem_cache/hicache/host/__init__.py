"""Host memory: SGLang's pools, free pages, and the ledger of all ranks."""
